"""Mixture-of-experts models that transformers spreads over GPUs, experts by torch and by pit-tvm.

    torchrun --nproc-per-node 2 scripts/bench_distributed.py qwen3-30b-a3b --how experts --train

``experts``: each rank has some experts; what else is split is up to transformers (attention is by
its plan for tensors in releases that know ``ep_size``, and not in older ones). ``tensor``: each
rank has a part of every weight. ``sharded``: weights are gathered where they are used (FSDP2). All
ranks get the same ids. Models are those of bench_experts.py, of ``--layers`` layers. One model is
loaded, and its experts are computed by transformers' default, ``grouped_mm``, and by pit-tvm in
turn; a time is that of the slowest rank, a number of bytes that of the rank with the most.

Compared are the first layer's experts: their output, and with ``--train`` the gradients of their
weights and of what they are given, for a fixed random gradient of the layer's output. There both
contenders get the same numbers and the same routing. Behind it, roundings of 16 bits move tokens to
other experts, with random weights more than with trained ones: how far logits differ is told, and
judged by nobody. With small models, on CPUs too, ours are also compared with the same layer of the
model in one process, on what the first layer of the spread model gives its experts; else all rests
on ``grouped_mm``. The exit status is 1 on all ranks if a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from bench_distributed_compare import compare
from bench_experts import (
    CASES,
    OURS,
    THEIRS,
    Kind,
    ids_of,
    one_pass,
    parse_shared,
    peak_bytes,
    row_of,
)
from bench_experts import text as text_of_experts
from bench_models import measure, where
from commands import parser_of, status_of
from needs import require

from pit_tvm.cli_options import at_least
from pit_tvm.errors import BackendUnavailable, mismatch

NAME = "bench_distributed"
WAYS = ("experts", "tensor", "sharded")
_STARTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # what torchrun says

Row = dict[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("models", nargs="+", choices=tuple(CASES), metavar="model", help=", ".join(CASES))
    add("--how", nargs="+", choices=WAYS, default=WAYS, help="default: all ways")
    add("--layers", type=at_least(1), default=2, help="of each model (default 2)")
    options = parse_shared(parser, argv)
    options.models = [name for name in CASES if name in options.models]
    options.how = [how for how in WAYS if how in options.how]
    return options


def splitting(how: str, world: int, known: Collection[str]) -> dict[str, Any]:
    """Arguments of transformers' DistributedConfig, whose fields ``known`` tell its release."""
    found: dict[str, Any] = {"fsdp_size" if how == "sharded" else "tp_size": world}
    if how == "experts":
        found |= {"ep_size": world} if "ep_size" in known else {"enable_expert_parallel": True}
    missing = ", ".join(sorted(set(found) - set(known)))
    if missing:
        expected = f"a transformers whose DistributedConfig has {', '.join(found)}"
        raise BackendUnavailable(mismatch("--how", expected, f"no {missing}", "upgrade it"))
    return found


def check_model(name: str, how: str, world: int, plan: Mapping[str, str]) -> None:
    """Refuse a model whose experts transformers' ``plan`` does not split over that many ranks."""
    if not any(".experts" in key for key in plan):
        others = " or ".join(each for each in WAYS if each != how)
        expected = f"a way in which transformers splits the experts of {name}"
        raise BackendUnavailable(mismatch("--how", expected, how, f"take {others}"))
    sizes, counts = CASES[name].sizes, {}
    if how == "experts":
        counts["experts"] = sizes.get("num_experts") or sizes["num_local_experts"]
    if any(key.endswith("k_proj") for key in plan):
        counts["heads of keys"] = sizes["num_key_value_heads"]
    for what, count in counts.items():
        if count % world:
            expected = f"ranks that divide the {count} {what} of {name} (--how {how})"
            advice = "start another number, or take --how sharded"
            raise BackendUnavailable(mismatch("--nproc-per-node", expected, world, advice))


def check(options: argparse.Namespace) -> None:
    """Refuse, equally on all ranks, what cannot be run here."""
    require(NAME, ("torch", "transformers", "tqdm"), "quickstart")
    if any(name not in os.environ for name in _STARTED):
        advice = f"torchrun --nproc-per-node N scripts/{NAME}.py ..."
        raise BackendUnavailable(mismatch(NAME, "a start by torchrun", "none", advice))
    world, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world > 1 and importlib.util.find_spec("accelerate") is None:
        what = "the package accelerate, by which transformers loads spread models"
        raise BackendUnavailable(mismatch(NAME, what, "none", "pip install accelerate"))
    where(NAME, options)
    import torch
    import transformers

    devices = torch.cuda.device_count()
    if options.device == "cuda" and devices < here:
        expected = f"a CUDA device for each of {here} ranks"
        raise BackendUnavailable(mismatch("--nproc-per-node", expected, devices, "start fewer"))
    if options.device == "cpu" and world > 1 and devices:
        # transformers takes what accelerator there is, and asks nobody.
        advice = "CUDA_VISIBLE_DEVICES= hides them"
        raise BackendUnavailable(mismatch("--device cpu", "no CUDA devices", devices, advice))
    for name in options.models:
        config = getattr(transformers, f"{CASES[name].family}Config")
        for how in options.how:
            plan: dict[str, str] = {}
            if how == "tensor" or hasattr(_config(how, world), "ep_size"):
                plan |= config.base_model_tp_plan or {}
            if how == "experts":  # beside the other plan in releases that know ep_size
                plan |= config.base_model_ep_plan or {}
            if how != "sharded":
                check_model(name, how, world, plan)


def _config(how: str, world: int) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**splitting(how, world, DistributedConfig.__dataclass_fields__))


@contextlib.contextmanager
def checkpoint(name: str, options: argparse.Namespace) -> Iterator[str]:
    """The folder of a model that rank 0 makes and all ranks may read inside; it is gone behind."""
    import torch
    from torch import distributed

    with contextlib.ExitStack() as stack:
        path, first = [""], distributed.get_rank() == 0
        if first:
            # torchrun ends the others so when one fails; it would leave the folder.
            previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            stack.callback(signal.signal, signal.SIGTERM, previous)
            path = [stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{NAME}-"))]
            with torch.device(options.device):
                model = CASES[name].make(options.quick, num_hidden_layers=options.layers)
            model.save_pretrained(path[0])
            del model
        distributed.broadcast_object_list(path)
        try:
            yield path[0]
        finally:
            if not first:  # after an error too: rank 0 waits for it before it removes the folder
                distributed.barrier()
        if first:
            distributed.barrier()


def load(path: str, **how: Any) -> Any:
    """The model of a checkpoint, with transformers' own experts."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, experts_implementation=THEIRS, **how
    )


def most(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Numbers, or lists of them, each the greatest of all ranks."""
    import torch
    from torch import distributed

    found = {}
    for name, value in values.items():
        held = torch.tensor(value, dtype=torch.float64, device=device)
        distributed.all_reduce(held, distributed.ReduceOp.MAX)
        found[name] = held.tolist()
    return found


def run_model(name: str, how: str, options: argparse.Namespace) -> Row:
    """Spread one model, compare, and measure; the row as JSON values, the same on all ranks."""
    import torch
    from torch import distributed

    cuda, device, train = options.device == "cuda", options.device, options.train
    world = distributed.get_world_size()
    with checkpoint(name, options) as path:
        model = load(path, distributed_config=_config(how, world))
        alone = load(path).to(device) if options.quick or not cuda else None
    if world == 1:  # not placed by transformers
        model = model.to(device)
    ids = ids_of(model, options)
    errors = most(compare(model, alone, ids, train), device)
    del alone
    kinds = {"torch": Kind(THEIRS), "pit-tvm": Kind(OURS)}
    runs = {label: one_pass(model, ids, kind, train) for label, kind in kinds.items()}
    with contextlib.nullcontext() if train else torch.no_grad():
        for run in runs.values():  # what the first call of all keeps is for libraries
            run()
        bytes_of = peak_bytes(model, runs, cuda)
        # Ranks begin together, so that none is charged for waiting for another.
        times = measure(runs, options.rounds, cuda, distributed.barrier)
    sizes = {label: int(size) for label, size in most(bytes_of, device).items()}
    logits = errors.pop("logits")
    layers, error = model.config.num_hidden_layers, max(errors.values())
    row = row_of(name, options, layers, most(times, device), sizes, error)
    return {**row, "how": how, "world": world, "errors": errors, "logits": logits}


def text(row: Mapping[str, Any]) -> str:
    """One row for people."""
    title = f"{row['model']}, {row['how']} of {row['world']} ranks"
    errors = ", ".join(f"from {name} {error:.1e}" for name, error in row["errors"].items())
    beside = f"  experts differ {errors}; logits (not judged) {row['logits']:.1e}"
    return f"{text_of_experts({**row, 'model': title})}\n{beside}"


def run(options: argparse.Namespace) -> int:
    """Measure, and on rank 0 print and write; the exit status."""
    check(options)
    import torch
    from bench_report import write
    from torch import distributed
    from transformers.utils import logging

    from pit_tvm.torch import register_experts

    register_experts(OURS)
    logging.disable_progress_bar()
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
    else:
        distributed.init_process_group("gloo")
    first, rows = distributed.get_rank() == 0, []
    found = {**where(NAME, options), "world": distributed.get_world_size()}
    for name, how in [(name, how) for name in options.models for how in options.how]:
        rows.append(run_model(name, how, options))
        if first:
            print(text(rows[-1]), flush=True)
        if first and options.json:
            write(options.json, json.dumps({**found, "rows": rows}, indent=1))
    wrong = [f"{r['model']} ({r['how']})" for r in rows if not r["error"] < r["error_limit"]]
    if first:
        print(f"{len(wrong)} wrong results{': ' * bool(wrong)}{', '.join(wrong)}")
    # torchrun ends all ranks when one has failed: not before the first has told what is wrong.
    distributed.barrier()
    # Only here: after an error it would wait for ranks that never come.
    distributed.destroy_process_group()
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = parse(argv)
    if os.environ.get("RANK", "0") != "0":
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when it is imported: one bar is enough
    # Every rank says what is missing: torchrun ends the others when one has failed, the first
    # perhaps unheard.
    return status_of(NAME, lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
