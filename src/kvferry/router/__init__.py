"""The reference router: joins prefill and decode engines behind one OpenAI address.

Words of this room:

* *piece*: one prompt and one choice of a client's request; everything below works on pieces.
* *handoff*: a prompt that a prefill engine has computed and keeps under a transfer id until a decode engine pulls it.
* *fault*: an attempt at one engine failed, another may do better. *RefusedError*: the client gets that answer.
* *directory*: which engine id answers behind a prefill address. *Release*: telling it that nobody will come.

Files, from the client inwards: ``app`` (routes), ``client`` (who may hang up), ``batch`` (pieces of a
request), ``relay`` (one piece), ``prefill`` and ``decode`` (one half each), ``pool`` (whom to ask),
``engines`` (HTTP). Pure: ``pieces``, ``merge``, ``events``, ``headers``.

It speaks to vLLM's own MooncakeConnector as well as to FerryConnector. It does not balance by prefix or by load of the
engine, nor discover engines; a production router such as ``vllm-router`` may stand in its place.
"""

from kvferry.router.app import build_app
from kvferry.router.config import Cooldown, Decode, Patience, Prefill, RouterConfig

__all__ = ["Cooldown", "Decode", "Patience", "Prefill", "RouterConfig", "build_app"]
