"""The main job: the linear layers of a real sentence encoder on padded batches of real sentences.

Every contender runs all layers of a batch in turn, one contender after the other; the next batch
starts with another contender. A layer's time is its median over the batches. The text ends with
one line of JSON; ``index_us`` and ``select_us`` in it are medians of one call, the ``_ms`` values
are sums over the layers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence

ERROR_LIMIT = 1e-5


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--sentences", type=positive, default=256, help="sentences in all (default 256)")
    add("--batch", type=positive, default=32, help="sentences of one batch (default 32)")
    add("--repeats", type=positive, default=1, help="measured passes over each batch (default 1)")
    add("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="default: all")
    add("--seed", type=int, default=0, help="chooses the sentences (default 0)")
    add("--plot", metavar="PNG", help="also draw the times")
    options = parser.parse_args(argv)
    if options.sentences % options.batch:
        parser.error("--sentences must be a multiple of --batch")
    return options


def processor() -> str:
    """Name of the processor, where the system tells it."""
    cpuinfo = "/proc/cpuinfo"
    if os.path.exists(cpuinfo):
        with open(cpuinfo, encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the exit status is 1 if a result is wrong."""
    options = parse(argv)
    # Read by the libraries when they are imported, hence before that.
    for name in ("OMP", "OPENBLAS", "MKL", "TVM"):
        os.environ[f"{name}_NUM_THREADS"] = str(options.threads)
    import numpy as np
    import quickstart_contenders as contenders
    import quickstart_data as data
    import torch
    from quickstart_measure import measure
    from quickstart_report import plot, print_table, summarise

    import pit_tvm

    torch.set_num_threads(options.threads)
    encoder = data.load_encoder()
    ids, lengths = data.tokenise(data.load_sentences(options.sentences, options.seed))
    fill, rows = float(lengths.sum()) / ids.size, options.batch * data.MAX_LEN
    print(
        f"{encoder.name} ({encoder.licence}): {len(encoder.layers)} layers; "
        f"{len(ids)} sentences of Python's documentation and of licences, "
        f"{lengths.min()} to {lengths.max()} tokens, padded to {data.MAX_LEN}, fill {fill:.3f}\n"
        f"{processor()}, {options.threads} threads; pit-tvm {pit_tvm.__version__}, "
        f"torch {torch.__version__}, numpy {np.__version__}"
    )
    cases = contenders.list_cases(encoder)
    start = time.perf_counter()
    pit = contenders.Pit(rows, cases)
    print(f"{len(pit.operators)} operators made ready in {time.perf_counter() - start:.1f} s")
    runs: dict[str, contenders.Run] = {
        "numpy": contenders.numpy_dense(rows),
        "torch": contenders.torch_padded(rows),
        "torch_gather": contenders.torch_gather(rows),
        "pit": pit.run,
    }
    batches = (
        contenders.make_batch(
            encoder, ids[at : at + options.batch], lengths[at : at + options.batch]
        )
        for at in range(0, len(ids), options.batch)
    )
    samples = measure(runs, pit, cases, batches, options.repeats)
    counts = {name: len(samples[0].seconds[name]) for name in ("pit", "numpy")}
    print(
        f"ms of one batch of {options.batch}, medians of {counts['pit']} batches (numpy: "
        f"{counts['numpy']}); inputs are the model's own activations;\n"
        "the error is the largest deviation over the largest value, in float64\n"
    )
    print_table(cases, samples, fill)
    summary = summarise(samples, fill)
    if options.plot:
        plot(options.plot, samples)
    worst = max(max(kept.errors.values()) for kept in samples)
    if not worst < ERROR_LIMIT:
        print(f"wrong: a relative error of {worst:.1e}, expected under {ERROR_LIMIT}")
    print(json.dumps(summary))
    return 0 if worst < ERROR_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
