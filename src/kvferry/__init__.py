"""kvferry: moves the KV cache of a prompt from the worker that computed it to the worker that goes on from it.

The rooms, each with its own vocabulary (see the ``__init__`` of each):

* :mod:`kvferry.layout`: who keeps which byte where (placements and bindings);
* :mod:`kvferry.plan`: two layouts and the block tables of a request, compiled into proven copy descriptors;
* :mod:`kvferry.protocol`: the producer and consumer state machines, without I/O;
* :mod:`kvferry.transport` and :mod:`kvferry.control`: how bytes and messages travel;
* :mod:`kvferry.runtime`: the only room where the pure rooms meet I/O;
* :mod:`kvferry.vllm`: the connector that vLLM loads; :mod:`kvferry.router` and :mod:`kvferry.cli`: the tools.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
