"""Which engines answer when the router starts, so that a mistyped address shows before the first request does.

Engines may start in any order, so an absent one is only said, and is used like any other as soon as it answers.
"""

import asyncio
import logging

from kvferry.router.config import RouterConfig
from kvferry.router.engines import Engines
from kvferry.router.faults import RefusedError, UpstreamError

logger = logging.getLogger(__name__)


async def call_roll(config: RouterConfig, engines: Engines) -> None:
    """Ask every engine and every bootstrap service once; one WARNING line for each that gives no answer."""
    asked = [
        *(("prefill engine", one.url, f"{one.url}/health") for one in config.prefills),
        *(("bootstrap service", one.bootstrap, f"{one.bootstrap}/health") for one in config.prefills),
        *(("decode engine", one.url, f"{one.url}/health") for one in config.decodes),
    ]
    answers = await asyncio.gather(*(_is_there(engines, *one) for one in asked))
    logger.info("%d of %d engines and bootstrap services answer", sum(answers), len(answers))


async def _is_there(engines: Engines, what: str, base: str, url: str) -> bool:
    try:
        await engines.get(url)
    except UpstreamError as fault:
        if fault.answer is None:
            logger.warning("%s %s does not answer yet (%s); requests try it all the same", what, base, fault.message)
            return False
    except RefusedError:
        pass  # it has nothing to say to this question, but it is there
    return True
