"""What a trial keeps in Python: attributes, closures and globals that are no part of a state dict.

``values`` looks at one value, notes what it holds, and puts that back; ``attributes`` does so for
what a model, its optimizer and its schedule keep; ``ambient`` for globals, of which a process has
one each for all of its trials.
"""

from shoal.pystate.ambient import Ambient
from shoal.pystate.attributes import Attributes

__all__ = ["Ambient", "Attributes"]
