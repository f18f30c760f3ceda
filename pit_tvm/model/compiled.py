"""Compiled models: called like the module, and saved to one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tvm

from ..errors import SavedModelError, mismatch
from ..runtime.arrays import as_numpy, as_torch, kind
from ..runtime.live_tokens import live_tokens
from ..shared import Shared
from .activity import Activity
from .experts import GROUPED
from .inputs import Inputs
from .layers import Layers
from .linear import LINEAR
from .machine import Machine
from .outputs import Outputs
from .packing import LIVE_TOKENS
from .propagate import Decision
from .report import summary
from .saved import Parts, write


class CompiledModel(Shared):
    """A model that runs on live tokens only. Call it as the module, by keyword; copies share it.

    ``compile`` and ``load`` make it, of a ``machine`` that runs its graph and of the ``layers``
    that the graph calls (`Layers` on a CPU); ``restore`` puts flat results into the containers
    that ``outputs`` describes.
    """

    def __init__(
        self,
        inputs: Inputs,
        layers: Any,
        decisions: Sequence[Decision],
        machine: Any,
        restore: Callable[[Sequence[Any]], Any],
        outputs: Callable[[], Outputs],
        module: tvm.IRModule | None = None,
    ) -> None:
        self._inputs, self._layers, self.decisions = inputs, layers, decisions
        self._machine = machine
        self._restore, self._outputs = restore, outputs
        #: The graph that runs, as Relax: ``module.show()`` prints it. None if it was loaded.
        self.module = module

    def __repr__(self) -> str:
        """The inputs of a call, how much runs on live tokens only, and the target."""
        inputs = ", ".join(f"{name} {one.dtype}" for name, one in self._inputs.known.items())
        live = summary(self.decisions).partition("\n")[0]
        return f"<{type(self).__name__} {inputs}; {live}; {self._layers.target.kind}>"

    def __call__(self, **inputs: Any) -> Any:
        """Run a batch.

        Parameters
        ----------
        **inputs
            CPU tensors or numpy arrays by the names of the example, of any batch and any length
            that the model admits. They are not copied if they are contiguous.

        Returns
        -------
        Any
            What the module returns, of torch tensors if any input is one, else of numpy arrays;
            a loaded model returns `NamedOutputs` in place of transformers' own. Where an output
            has a value for every token, those of dead tokens are 0; and where the model picks the
            hidden state of one token of each sequence (the first, to pool) and that one is dead, it
            picks zeros.

        Raises
        ------
        ShapeError, DTypeError
            An input is missing, unknown, of another type or shape, or has ids outside its table,
            or of live tokens ids of no expert;
            the mask has other values than 0 and 1; there are more tokens than the model admits.
        """
        found = self._machine(*self._inputs.check(inputs))
        torch_asked = any(kind(value) == "torch" for value in inputs.values())
        convert = as_torch if torch_asked else as_numpy
        return self._restore([convert(tensor) for tensor in found])

    def save(self, path: str | Path) -> None:
        """Write all that a call needs to one file, for `load`.

        Raises
        ------
        SavedModelError
            The file cannot be written, or the model returns containers that a file cannot name.
        BackendUnavailable
            The kernel cache cannot be written, and so has no files of the compiled kernels.
        """
        outputs = self._outputs()
        self._layers.prepare()
        layers, target = self._layers, self._layers.target
        parts = Parts(
            target,
            self._inputs,
            outputs,
            self.decisions,
            self._machine.graph,
            layers.found,
            layers.kernels,
            layers.tiles,
            layers.threshold,
            layers.grouped.found,
        )
        write(parts, path)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """SavedModelError: compiled code and the threads that run it are not pickled."""
        expected, advice = (
            "one that is shared as it is",
            "use .save(path) and pit_tvm.model.load(path)",
        )
        raise SavedModelError(mismatch("compiled model", expected, "a pickle", advice))

    def explain(self) -> str:
        """How many operators run on live tokens only; which do not, and what keeps each from it;
        and how layers on activations have run."""
        return "\n".join([summary(self.decisions), *map(str, self.activity)])

    @property
    def layers(self) -> Any:
        """The linear layers alone: ``layers(number, x, out)`` runs the one that `activity` and
        ``pit-tvm explain --model`` call so, for x ``[rows, k]`` and out ``[rows, n]``."""
        return self._layers

    @property
    def activity(self) -> list[Activity]:
        """What each linear layer on activations did in calls so far, by numbers of rows: its
        decision, the live share that it rests on, and the error that a threshold made."""
        return list(self._layers.activity)


def machine_of(export: Callable[[str], Any], layers: Layers) -> Machine:
    """A machine for the library that ``export`` writes to a file, which calls ``layers``."""
    functions: dict[str, Callable[..., Any]] = {
        LINEAR: layers.__call__,
        GROUPED: layers.grouped.__call__,
        LIVE_TOKENS: _live_tokens,
    }
    return Machine(export, functions)


def _live_tokens(mask: Any) -> list[Any]:
    return [tvm.runtime.tensor(part) for part in live_tokens(mask)]
