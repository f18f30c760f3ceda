"""The main job: a whole sentence encoder on padded batches of real sentences, against torch.

Sentences come in the order of a hash, padded to 128 tokens. torch runs them so, and sorted by
length with each batch cut to its longest sentence, both as it is and under torch.compile; pit-tvm
runs the padded batches. The text ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from needs import limit_threads
from out_paths import out_file, picture

from pit_tvm.cli_options import at_least

LEAST_COSINE = 0.99999
QUERIES = 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--sentences", type=at_least(1), default=1024, help="sentences in all (default 1024)")
    add("--batch", type=at_least(1), default=32, help="sentences of one batch (default 32)")
    add("--rounds", type=at_least(1), default=5, help="measured passes over all (default 5)")
    add("--seconds", type=float, default=60, help="begin no more rounds after these (default 60)")
    add("--threads", type=at_least(1), default=len(os.sched_getaffinity(0)), help="default: all")
    add("--seed", type=int, default=0, help="chooses the sentences (default 0)")
    add("--no-torch-compile", action="store_true", help="leave torch.compile out")
    add("--plot", type=picture, metavar="PNG", help="also draw time against fill")
    add("--json", type=out_file, metavar="FILE", help="also write the last line to a file")
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
    """Run the job; the exit status is 1 if a sentence's vector is wrong."""
    options = parse(argv)
    limit_threads(options.threads)
    import quickstart_data as data
    import torch

    torch.set_num_threads(options.threads)
    encoder = data.load_encoder()
    sentences = data.load_sentences(options.sentences, options.seed)
    summary = run(options, encoder, sentences)
    wrong = not summary["least_cosine"] >= LEAST_COSINE
    if wrong:
        print(f"wrong: a cosine of {summary['least_cosine']}, expected at least {LEAST_COSINE}")
    line = json.dumps(summary)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if wrong else 0


def run(options: argparse.Namespace, encoder: Any, sentences: list[str]) -> dict[str, Any]:
    """Compile, compare, measure and print; the values of the JSON line."""
    import quickstart_contenders as contenders
    import quickstart_data as data
    import quickstart_measure as measuring
    import quickstart_report as report

    ids, mask = data.tokenise(sentences)
    padded = data.in_order(ids, mask, options.batch)
    cut = data.by_length(ids, mask, options.batch, cut=True)
    fill = float(mask.float().mean())
    introduce(options, encoder, mask.sum(1), fill)
    torch_compile = not options.no_torch_compile
    if torch_compile and not contenders.has_compiler():
        print("torch.compile is left out: it needs a C++ compiler")
        torch_compile = False
    start = time.perf_counter()
    made = contenders.make_contenders(encoder.module, padded, cut, torch_compile=torch_compile)
    ours = contenders.vectors_of(made[contenders.PIT], len(sentences))
    theirs = contenders.vectors_of(made[contenders.SORTED], len(sentences))
    cosine = measuring.least_cosine(ours, theirs)
    spent = ", ".join(f"{name} {s:.0f} s" for name, s in made.compile_seconds.items())
    print(f"compiled: {spent}; ready in {time.perf_counter() - start:.0f} s")
    samples = measuring.measure(made.known, options.seconds, options.rounds)
    share = measuring.index_seconds(padded) / measuring.mean_seconds(samples[contenders.PIT])
    report.print_table(samples, options.batch)
    print(
        f"\ncosine with torch's vectors: at least {cosine:.7f}; finding live tokens takes "
        f"{share:.2%} of pit-tvm's time\nnearest sentences:"
    )
    report.print_neighbours(sentences, ours, QUERIES)
    if options.plot:
        spread = data.by_length(ids, mask, options.batch, cut=False)
        report.plot(options.plot, report.times_by_fill(made, spread), options.batch)
    return {
        "model": encoder.name,
        "sentences": len(sentences),
        "batch": options.batch,
        "threads": options.threads,
        "fill": round(fill, 4),
        "least_cosine": cosine,
        **report.summarise(samples, options.batch),
        "index_share": round(share, 5),
        "compile_seconds": {name: round(s, 1) for name, s in made.compile_seconds.items()},
        "rounds": max(len(taken) for taken in samples[contenders.PIT].values()),
    }


def introduce(options: argparse.Namespace, encoder: Any, lengths: Any, fill: float) -> None:
    """What runs, on what, with what."""
    import torch
    from quickstart_data import MAX_LEN

    import pit_tvm

    print(
        f"{encoder.name} ({encoder.licence}); {len(lengths)} sentences of Python's documentation "
        f"and of licences, {lengths.min()} to {lengths.max()} tokens, padded to {MAX_LEN}, "
        f"fill {fill:.3f}\n{processor()}, {options.threads} threads; pit-tvm "
        f"{pit_tvm.__version__}, torch {torch.__version__}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
