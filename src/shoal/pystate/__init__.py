"""What a trial keeps in Python: attributes, closures and globals that are no part of a state dict.

``values`` looks at one value, notes what it holds, and puts that back; ``attributes`` does so for
what a model, its optimizer and its schedule keep; ``ambient`` for globals, of which a process has
one each for all of its trials.

What the user's modules hold when a study is run goes to workers: ``modulestate`` takes it, and
``statepickler`` makes bytes of it; ``sendable`` says of what, ``standins`` in which form,
``bytype`` what a type alone knows, and ``comparing`` and ``fingerprints`` whether a worker has the
rest. There ``arriving`` reads it, and ``bringing`` puts it into what the worker has.
"""

from shoal.pystate.ambient import Ambient
from shoal.pystate.attributes import Attributes

__all__ = ["Ambient", "Attributes"]
