"""The producer side of one worker: answers pulls by writing published caches into the consumers' memory.

One thread with one loop owns everything: the listener's messages, the machine (:mod:`kvferry.protocol`), the engine
and the writes under way. The embedding engine's thread only hands in *expect*, *publish* and *withdraw* and takes out
the tickets whose blocks are quiet; it never waits.

A pull goes: decoded, admitted (:mod:`kvferry.runtime.admission`), told to the machine; the machine answers with writes
to start once the transfer is published (:mod:`kvferry.runtime.sending`), and with replies
(:mod:`kvferry.runtime.open_pulls`).
"""

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from kvferry.errors import PlanError, ProtocolReason, RemoteProtocolError
from kvferry.ids import TransferId
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
    ProveQuiet,
    Published,
    Pull,
    PullArrived,
    Puller,
    PullIgnored,
    PullRefused,
    QuietAnswer,
    QuietAsk,
    ReleaseNotice,
    ReleaseOrdered,
    Reply,
    SourceReleased,
    Span,
    StartWrite,
    Status,
    Ticket,
    Withdrawn,
    WriteFailed,
    decode_inbound,
    make_hello_answer,
    make_refusal,
    number_of,
    numbered,
    puller_of,
    puller_of_side,
    requests_of,
)
from kvferry.runtime.admission import Admitted, LayoutMissError, admit, refusal_of
from kvferry.runtime.barred import Barred
from kvferry.runtime.doors import check_door, check_upstream_peer
from kvferry.runtime.journal import ProducerJournal
from kvferry.runtime.loop import LoopThread
from kvferry.runtime.open_pulls import Connection, OpenPulls, Outlet
from kvferry.runtime.options import RuntimeOptions
from kvferry.runtime.plans import Plans
from kvferry.runtime.publications import Prompts, Publication
from kvferry.runtime.pump import Pump
from kvferry.runtime.sending import Sender, Sent
from kvferry.runtime.sides import Local
from kvferry.runtime.upstream_serving import UpstreamCounter
from kvferry.runtime.verify import features_of

logger = logging.getLogger(__name__)


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
        self._guarded = options.secret is not None
        self._peers = options.upstream_peers
        self._sender = Sender(local, options, thread, feed=self.feed, on_sent=self._sent, on_renewed=journal.renewed)
        self._machine = Producer(replace(options.producer_limits, stranger_wait=options.timing.orphan))
        self.story = self._machine.story
        """Lives of the newest transfers, for people."""
        self._pump: Pump[ProducerEvent, ProducerAction] = Pump(
            self._machine, self._perform, tick=ProducerTick(), loop=thread.loop
        )
        self._pulls = OpenPulls(local.side())
        self._upstream = UpstreamCounter(local, self._plans, options.upstream_peers)
        self._prompts = Prompts()
        self._barred = Barred()
        self.quiet: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        """Tickets whose blocks may be used again; taken out by the embedding engine's thread."""

    @property
    def sender(self) -> Sender:
        """The engine and its writes."""
        return self._sender

    def attach(self, outlet: Outlet) -> None:
        """The listener is up: replies go there."""
        self._pulls.attach(outlet)

    @property
    def clock(self) -> Callable[[], float]:
        """That of all deadlines and stories here."""
        return self._pump.now

    def feed(self, event: ProducerEvent) -> None:
        """Hand an event to the machine."""
        self._pump.feed(event)

    # -- from the network ------------------------------------------------------------------------------------

    def on_message(self, connection: Connection, data: bytes) -> None:
        """A frame of a consumer rank."""
        try:
            message = decode_inbound(data)
            check_door(connection, message, guarded=self._guarded)
            check_upstream_peer(message, self._peers, self._pulls.address_of(connection))
        except RemoteProtocolError as error:
            logger.warning("a message of a peer is refused: %s", error)
            refusal = make_refusal(error.reason, error.message, producer=self._local.side())
            self._pulls.send(connection, numbered(refusal, number_of(data)))
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
                self._pulls.send(connection, answer)
            case Pull():
                self._on_pull(connection, message)
            case _:
                self._on_note(connection, message.kvferry)

    def on_lost(self, connection: Connection) -> None:
        """A connection is gone, or has been silent for too long."""
        if lost := self._pulls.of_connection(connection):
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
        number = self._pulls.add(connection, pull, admitted)
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
        self._pulls.send(connection, refusal)
        self.feed(PullRefused(puller_of(pull), transfers))

    def _on_note(self, connection: Connection, note: LayoutAsk | AbortNotice | ReleaseNotice | QuietAsk) -> None:
        match note:
            case LayoutAsk():
                # Only our own, and each once: what others have told is not passed on.
                known = self._plans.own_encoded(note.fingerprints)
                answer = LayoutAnswer(version=VERSION, ask=note.ask, placements=known)
                self._pulls.send(connection, Reply(status=Status.FINISH, kvferry=answer))
            case QuietAsk():
                quiet = self._give_up_for(puller_of_side(note.consumer), note.below)
                self._pulls.send(connection, Reply(Status.FINISH, kvferry=QuietAnswer(VERSION, note.ask, quiet)))
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
        barred = self._barred.bar(puller, below)
        if lost := self._pulls.older(puller, below):
            self.feed(ConsumerLost(lost))
        return barred and not self._pulls.older(puller, below)

    # -- what the machine asks for ---------------------------------------------------------------------------

    def _perform(self, action: ProducerAction) -> None:
        match action:
            case Answer():
                self._pulls.answer(action)
            case PullIgnored():
                self._pulls.forget(action.pull)
            case StartWrite():
                self._start(action)
            case CancelWrite():
                self._sender.cancel(action.write)
            case ProveQuiet():
                self._sender.prove_quiet(action.writes)
            case LeaseEnded():
                self._journal.lease_ended(action)
            case SourceReleased():
                self._prompts.forget(action.transfer, action.ticket)
                self.quiet.put(action.ticket)
            case _:
                assert_never(action)

    def _start(self, action: StartWrite) -> None:
        admitted = self._pulls.admitted(action.write.pull)
        if admitted.lists is not None:
            try:
                wanted = admitted.lists(action.wanted, action.tokens, self._prompts.length(action.transfer))
            except RemoteProtocolError as error:
                logger.warning("transfer %s: a request of a pull is refused: %s", action.transfer, error)
                self.feed(WriteFailed(action.write, error.reason, quiet=True, detail=error.message))
                return
            action = replace(action, wanted=wanted)
        self._sender.start(action, admitted)

    def _sent(self, sent: Sent) -> None:
        """A write is over, and its memory has not gone back yet."""
        self._pulls.sent(sent)
        self._journal.sent(sent)

    # -- from the embedding engine ---------------------------------------------------------------------------

    def expect(self, transfer: TransferId) -> None:
        """The prompt is being computed, or waits for it."""
        self.feed(Announced(transfer, deadline=self._pump.now() + self._timing.announced))

    def publish(self, publication: Publication) -> None:
        """The prompt is computed."""
        deadline = self._pump.now() + self._timing.publish
        self._journal.published(publication.transfer, publication.request)
        self._prompts.note(publication)
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
        self._sender.closing()
        self.feed(ProducerClosing())
        self._pump.stop()

    async def close(self) -> None:
        """Destroy the engine."""
        await self._sender.close()
