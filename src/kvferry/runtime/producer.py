"""The producer side of one worker: answers pulls by writing published caches into the consumers' memory.

One thread with one loop owns everything: the listener's messages, the machine (:mod:`kvferry.protocol`), the engine
and the writes under way. The embedding engine's thread only hands in *expect*, *publish* and *withdraw* and takes out
the tickets whose blocks are quiet; it never waits.

A pull goes: decoded, admitted (:mod:`kvferry.runtime.admission`), told to the machine; the machine answers with writes
to start once the transfer is published, and with replies. The order of things that makes a digest meaningful is kept
here: it is taken after the last byte was written and before the machine hears of that, hence before blocks go back.
"""

import itertools
import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

from msgspec import structs

from kvferry.errors import PlanError, ProtocolReason, RemoteProtocolError
from kvferry.ids import RequestId, TransferId
from kvferry.protocol import (
    VERSION,
    AbortNotice,
    Announced,
    Answer,
    CancelWrite,
    ConsumerLost,
    Hello,
    LayoutAnswer,
    LayoutAsk,
    LeaseEnded,
    PeerAborted,
    Producer,
    ProducerAction,
    ProducerClosing,
    ProducerEvent,
    ProducerTick,
    PromptMark,
    ProveQuiet,
    Published,
    Pull,
    PullArrived,
    Puller,
    PullId,
    PullIgnored,
    PullRefused,
    QuietAnswer,
    QuietAsk,
    ReleaseNotice,
    ReleaseOrdered,
    Reply,
    ReplyExtension,
    SourceReleased,
    Span,
    StartWrite,
    Status,
    Table,
    Ticket,
    Withdrawn,
    WriteFailed,
    decode_inbound,
    encode,
    make_hello_answer,
    make_refusal,
    make_reply,
    puller_of,
    puller_of_side,
    requests_of,
)
from kvferry.runtime.admission import Admitted, LayoutMissError, admit, refusal_of
from kvferry.runtime.barred import Barred
from kvferry.runtime.doors import check_door, check_upstream_peer
from kvferry.runtime.journal import ProducerJournal
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.plans import Plans
from kvferry.runtime.pump import Pump
from kvferry.runtime.sending import Sender, Sent
from kvferry.runtime.sides import Local
from kvferry.runtime.upstream_serving import UpstreamCounter
from kvferry.runtime.verify import features_of

logger = logging.getLogger(__name__)

Connection = bytes
"""A consumer rank's connection, as the listener names it."""


class Outlet(Protocol):
    """Where replies go."""

    def send(self, connection: Connection, data: bytes) -> None:
        """Send one frame; to a connection that is gone, nowhere."""

    def address_of(self, connection: Connection) -> str:
        """The IP address that it comes from, while its message is being dealt with; else empty."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A computed prompt, offered to its consumer."""

    ticket: Ticket
    """Reported once its blocks may be used again."""
    request: RequestId
    """What the local engine calls it."""
    transfer: TransferId
    tokens: int
    """Positions ``[0, tokens)`` are computed."""
    tables: tuple[Table, ...]
    prompt: tuple[PromptMark, ...] = ()
    """What they are computed from, at each length at which a consumer may stop."""
    prompt_tokens: int | None = None
    """Length of the whole prompt, where its last token was left to the consumer; ``None``: it is ``tokens``."""


@dataclass(frozen=True, slots=True)
class _OpenPull:
    connection: Connection
    message: Pull
    admitted: Admitted


class ProducerCore:
    """All of a producer that lives on its loop."""

    def __init__(
        self,
        local: Local,
        thread: LoopThread,
        options: RuntimeOptions,
        *,
        journal: ProducerJournal,
    ) -> None:
        self._local = local
        self._timing = options.timing
        self._journal = journal
        self._plans = Plans(local.placements, layouts=options.max_layouts)
        self._outlet: Outlet | None = None
        self._guarded = options.secret is not None
        self._peers = options.upstream_peers
        self._sender = Sender(local, options, thread, feed=self.feed, on_sent=self._sent, on_renewed=journal.renewed)
        self._machine = Producer(replace(options.producer_limits, stranger_wait=options.timing.orphan))
        self.story = self._machine.story
        """Lives of the newest transfers, for people."""
        self._pump: Pump[ProducerEvent, ProducerAction] = Pump(
            self._machine, self._perform, tick=ProducerTick(), loop=thread.loop
        )
        self._pull_ids = itertools.count(1)
        self._pulls: dict[PullId, _OpenPull] = {}
        self._digests: dict[PullId, dict[str, bytes]] = {}
        """Of what was written for open pulls, by request, until its end is told."""
        self._withheld: set[PullId] = set()
        """Open pulls of upstream consumers that are not told the end of one of their requests."""
        self._upstream = UpstreamCounter(local, self._plans, options.upstream_peers)
        self._prompts: dict[TransferId, tuple[Ticket, int]] = {}
        """Lengths of the prompts of published transfers, with the publication that each is of."""
        self._barred = Barred()
        self.quiet: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        """Tickets whose blocks may be used again; taken out by the embedding engine's thread."""

    @property
    def sender(self) -> Sender:
        """The engine and its writes."""
        return self._sender

    def attach(self, outlet: Outlet) -> None:
        """The listener is up: replies go there."""
        self._outlet = outlet

    def feed(self, event: ProducerEvent) -> None:
        """Hand an event to the machine."""
        self._pump.feed(event)

    # -- from the network ------------------------------------------------------------------------------------

    def on_message(self, connection: Connection, data: bytes) -> None:
        """A frame of a consumer rank."""
        try:
            message = decode_inbound(data)
            check_door(connection, message, guarded=self._guarded)
            check_upstream_peer(message, self._peers, self._address_of(connection))
        except RemoteProtocolError as error:
            logger.warning("a message of a peer is refused: %s", error)
            self._send(connection, make_refusal(error.reason, error.message, producer=self._local.side()))
            return
        match message:
            case Pull(kvferry=Hello()):
                sender = self._sender
                side = self._local.side()
                answer = make_hello_answer(
                    side,
                    transport=sender.transport,
                    transport_address=sender.address,
                    features=features_of(self._local),
                )
                self._send(connection, answer)
            case Pull():
                self._on_pull(connection, message)
            case _:
                self._on_note(connection, message.kvferry)

    def _address_of(self, connection: Connection) -> str:
        return self._outlet.address_of(connection) if self._outlet is not None else ""

    def on_lost(self, connection: Connection) -> None:
        """A connection is gone, or has been silent for too long."""
        lost = tuple(pull for pull, known in self._pulls.items() if known.connection == connection)
        if lost:
            self.feed(ConsumerLost(lost))

    def _on_pull(self, connection: Connection, pull: Pull) -> None:
        try:
            admitted = self._admit(pull)
            requests = requests_of(pull)
            if admitted.idle:
                requests = tuple(replace(request, release=True) for request in requests)
        except (RemoteProtocolError, PlanError) as error:
            reason, said = refusal_of(error)
            missing = error.missing if isinstance(error, LayoutMissError) else ()
            if not missing:
                logger.warning("a pull is refused: %s", error)
            side = self._local.side()
            self._refuse(connection, pull, make_refusal(reason, said, pull=pull, producer=side, missing=missing))
            return
        if self._barred.bars(puller_of(pull), admitted.pull):
            said = "the consumer has given this pull up before it came"
            answer = make_refusal(ProtocolReason.ABORTED, said, pull=pull, producer=self._local.side())
            self._refuse(connection, pull, answer)
            return
        number = PullId(next(self._pull_ids))
        self._pulls[number] = _OpenPull(connection, pull, admitted)
        for request in requests:
            if request.release:
                self._journal.released(admitted, request)
        self.feed(PullArrived(number, puller_of(pull), requests, admitted.expected))

    def _admit(self, pull: Pull) -> Admitted:
        transport = self._sender.transport
        if pull.kvferry is None:
            return self._upstream.admit(pull, transport=transport)
        return admit(pull, self._local, self._plans, transport=transport)

    def _refuse(self, connection: Connection, pull: Pull, refusal: Reply) -> None:
        """Refuse a pull, and tell the machine of it: whoever sent it may die without another word.

        A refusal says that nothing is written for it. So one that repeats a pull which is not over is not answered.
        """
        transfers = tuple(dict.fromkeys(TransferId(transfer) for transfer, _ in pull.req_blocks.values()))
        if self._machine.serves(puller_of(pull), transfers):
            return
        self._send(connection, refusal)
        self.feed(PullRefused(puller_of(pull), transfers))

    def _on_note(self, connection: Connection, note: LayoutAsk | AbortNotice | ReleaseNotice | QuietAsk) -> None:
        match note:
            case LayoutAsk():
                # Only our own, and each once: what others have told is not passed on.
                known = self._plans.own_encoded(note.fingerprints)
                answer = LayoutAnswer(version=VERSION, ask=note.ask, placements=known)
                self._send(connection, Reply(status=Status.FINISH, kvferry=answer))
            case QuietAsk():
                quiet = self._give_up_for(puller_of_side(note.consumer), note.below)
                self._send(connection, Reply(Status.FINISH, kvferry=QuietAnswer(VERSION, note.ask, quiet)))
            case ReleaseNotice():
                self.release([TransferId(transfer) for transfer in note.transfers])
            case AbortNotice():
                puller = puller_of_side(note.consumer)
                for transfer in note.transfers:
                    self.feed(PeerAborted(puller, TransferId(transfer), note.expected, failed=note.failed))
            case _:
                assert_never(note)

    def _give_up_for(self, puller: Puller, below: int) -> bool:
        """Drop a consumer rank's older pulls, for good; whether none of them has a byte under way."""

        def old() -> tuple[PullId, ...]:
            return tuple(
                number
                for number, known in self._pulls.items()
                if known.admitted.pull < below and puller_of(known.message) == puller
            )

        barred = self._barred.bar(puller, below)
        if lost := old():
            self.feed(ConsumerLost(lost))
        return barred and not old()

    # -- what the machine asks for ---------------------------------------------------------------------------

    def _perform(self, action: ProducerAction) -> None:
        match action:
            case Answer():
                self._answer(action)
            case PullIgnored():
                self._forget_pull(action.pull)
            case StartWrite():
                self._start(action)
            case CancelWrite():
                self._sender.cancel(action.write)
            case ProveQuiet():
                self._sender.prove_quiet(action.writes)
            case LeaseEnded():
                self._journal.lease_ended(action)
            case SourceReleased():
                self._forget_prompt(action.transfer, action.ticket)
                self.quiet.put(action.ticket)
            case _:
                assert_never(action)

    def _start(self, action: StartWrite) -> None:
        admitted = self._pulls[action.write.pull].admitted
        if admitted.lists is not None:
            _, prompt_tokens = self._prompts[action.transfer]
            try:
                wanted = admitted.lists(action.wanted, action.tokens, prompt_tokens)
            except RemoteProtocolError as error:
                logger.warning("transfer %s: a request of a pull is refused: %s", action.transfer, error)
                self.feed(WriteFailed(action.write, error.reason, quiet=True, detail=error.message))
                return
            action = replace(action, wanted=wanted)
        self._sender.start(action, admitted)

    def _forget_prompt(self, transfer: TransferId, ticket: Ticket) -> None:
        """Of the publication that counted; another one under the same id may come and go meanwhile."""
        if transfer in self._prompts and self._prompts[transfer][0] == ticket:
            del self._prompts[transfer]

    def _answer(self, action: Answer) -> None:
        known = self._pulls[action.pull]
        reply = make_reply(self._withholding(action, known), known.message, self._local.side())
        made = self._digests.get(action.pull, {})
        digests = {str(one): made.pop(one) for one in action.ok if one in made}
        if digests and isinstance(reply.kvferry, ReplyExtension):
            reply = structs.replace(reply, kvferry=structs.replace(reply.kvferry, digests=digests))
        self._send(known.connection, reply)
        if action.finish:
            self._forget_pull(action.pull)

    def _forget_pull(self, pull: PullId) -> None:
        del self._pulls[pull]
        self._digests.pop(pull, None)
        self._withheld.discard(pull)

    def _withholding(self, action: Answer, known: _OpenPull) -> Answer:
        """What may be said of it. An upstream consumer frees blocks on every word, and cannot be told to fence first.

        So of a request whose bytes may still land it hears nothing, and no FINISH: it gives up in its own time.
        """
        if known.message.kvferry is None and any(one.landing for one in action.err):
            self._withheld.add(action.pull)
            logger.warning("a pull of %s is left unanswered: what had left for it may still land", known.admitted.peer)
        if action.pull not in self._withheld:
            return action
        return replace(action, err=tuple(one for one in action.err if not one.landing), finish=False)

    def _sent(self, sent: Sent) -> None:
        """A write is over, and its memory has not gone back yet."""
        if sent.digests is not None and sent.write.pull in self._pulls:
            self._digests.setdefault(sent.write.pull, {})[sent.write.request] = sent.digests.data
        self._journal.sent(sent)

    def _send(self, connection: Connection, reply: Reply) -> None:
        if self._outlet is not None:
            self._outlet.send(connection, encode(reply))

    # -- from the embedding engine ---------------------------------------------------------------------------

    def expect(self, transfer: TransferId) -> None:
        """The prompt is being computed."""
        self.feed(Announced(transfer, deadline=time.monotonic() + self._timing.publish))

    def publish(self, publication: Publication) -> None:
        """The prompt is computed."""
        deadline = time.monotonic() + self._timing.publish
        self._journal.published(publication.transfer, publication.request)
        prompt_tokens = publication.prompt_tokens or publication.tokens
        self._prompts.setdefault(publication.transfer, (publication.ticket, prompt_tokens))
        span = Span(0, publication.tokens)
        self.feed(
            Published(
                publication.transfer,
                publication.ticket,
                span,
                publication.tables,
                deadline,
                prompt=publication.prompt,
            )
        )

    def spoiled(self, publication: Publication) -> None:
        """The device failed before the prompt was computed: nothing of it is sent, and its blocks go back."""
        if publication.transfer not in self._prompts:
            self.withdraw(publication.transfer)  # whoever waits for it is told now
        self.publish(publication)  # which is given back: the transfer is over, or another publication's

    def withdraw(self, transfer: TransferId) -> None:
        """It will not be."""
        self.feed(Withdrawn(transfer))

    def release(self, transfers: Sequence[TransferId]) -> None:
        """The router says that nobody will come for these."""
        self.feed(ReleaseOrdered(tuple(transfers)))

    def closing(self) -> None:
        """Nothing starts any more."""
        self.feed(ProducerClosing())
        self._pump.stop()

    async def close(self) -> None:
        """Destroy the engine."""
        await self._sender.close()
