"""Trials of kernels for weights of codes: bits, microseconds by variant, what limits them, and passes with the best.

    python benchmarks/gpu_weights_trials.py [--seconds 140]

Every family of variants of every kind runs in a process of its own, so that a crash loses that family only; one process
at a time has the GPU. Weights of 200 MB and more are rotated, so that they come from memory.
"""
# mypy: ignore-errors

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from unittest.mock import patch

ROWS = (1, 4, 16, 64)
TRIED = (1, 16, 64)
HERE = pathlib.Path(__file__).resolve()


def named(ring) -> str:
    if ring is None:
        return "default"
    return f"{ring.n} {ring.unroll}x{ring.stages} w{ring.warps} p{ring.programs}"


def trials(kind: str, shape: str, rows: int) -> list:
    from paceline.models.triton.codes import Ring

    wide, fp8 = shape == "gate_up", kind == "fp8"
    if rows > 16:
        if wide:
            return [
                Ring(64, 256, 2, 3, 8),
                Ring(64, 128, 2, 3, 4, 2),
                Ring(64, 128, 2, 4, 4, 1),
                Ring(64, 128, 2, 3, 8, 1),
                Ring(64, 256, 1, 5, 8),
            ]
        return [
            Ring(64, 64, 2, 6, 4, 2),
            Ring(64, 64, 4, 3),
            Ring(64, 64, 2, 4, 4, 2),
            Ring(64, 64, 2, 3, 4, 2),
            Ring(64, 64, 4, 3, 4, 2),
        ]
    m = 8 if rows <= 8 else 16
    if wide:
        found = [(256, 2, 5, 8, 1), (128, 4, 3, 4, 2), (128, 2, 6, 4, 2), (128, 4, 3, 4, 3), (64, 4, 3, 4, 3)]
        found += (
            [(256, 4, 2, 8, 1)] if fp8 else [(256, 4, 3, 8, 1), (128, 4, 4, 4, 2), (64, 4, 4, 4, 3), (128, 8, 2, 4, 2)]
        )
    elif fp8:
        found = [
            (64, 4, 4, 4, 1),
            (64, 4, 4, 4, 2),
            (64, 4, 5, 4, 2),
            (64, 2, 8, 4, 2),
            (64, 8, 2, 4, 2),
            (64, 8, 3, 4, 1),
        ]
        found += [(64, 4, 3, 4, 3)]
    else:
        found = [
            (64, 8, 4, 4, 1),
            (64, 8, 4, 4, 2),
            (64, 4, 6, 4, 2),
            (64, 4, 8, 4, 2),
            (64, 8, 3, 4, 2),
            (64, 8, 2, 4, 3),
        ]
        found += [(64, 4, 6, 4, 1)]
    return [Ring(m, *each) for each in found]


BEST: dict = {}


@contextlib.contextmanager
def gpu(folder: pathlib.Path):
    """One process at a time."""
    import torch

    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watchdog = threading.Timer(12, os._exit, [3])  # a kernel that hangs must not keep the others from the GPU
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
            torch.cuda.synchronize()
        finally:
            watchdog.cancel()
            fcntl.flock(lock, fcntl.LOCK_UN)


def child(family: str, kind: str, folder: pathlib.Path) -> None:
    import torch
    from gpu_weights import LINEARS, SIZE, made, uses

    from paceline.models.triton.linear import linear
    from paceline.models.triton.parallel_compile import parallel_compile
    from paceline.models.triton_kernels import TritonKernels
    from paceline.models.weights import Linear

    torch.manual_seed(0)
    before = [row for row in lines_of(folder) if row.get("family") == family and row["kind"] == kind]
    finished = {row["finished"] for row in before if "finished" in row}
    trying = [row["trying"] for row in before if "trying" in row][-1:]  # the one that ended the process before this one
    crashed = {row["crashed"] for row in before if "crashed" in row}
    found = open(folder / f"{family}-{kind}.jsonl", "a", buffering=1)  # noqa: SIM115

    def tell(**row) -> None:
        found.write(json.dumps({"family": family, "kind": kind, **row}) + "\n")

    if trying:
        crashed.add(trying[0])
        shape, rows, trial = trying[0].split("|")
        tell(crashed=trying[0], shape=shape, rows=int(rows), trial=trial, us=None, why="the process ended")
    device, started = torch.device("cuda"), time.perf_counter()
    with torch.inference_mode():
        kernels, work = TritonKernels(device), []
        if work == []:
            for shape, (n, k) in LINEARS.items():
                if shape != family or shape in finished:
                    continue
                first = kernels.pack(made(kind, n, k)).weight
                copies = math.ceil(200e6 / first.nbytes)
                several = [first]
                for _ in range(copies - 1):
                    data = first.data.flatten().roll(int(torch.randint(1, 1 << 20, ())) * 16).view(first.data.shape)
                    several.append(type(first)(first.kind, data, first.shape, first.scales.clone(), None, None))
                weights = [Linear(each, None) for each in several]
                x = torch.randn(64, k, device=device).to(torch.bfloat16)
                for rows in TRIED:
                    use = dict(uses(LINEARS, SIZE.head_dim, SIZE.kv_heads, rows))[shape]
                    given = x[:rows].contiguous()
                    for trial in [None, *trials(kind, shape, rows)]:
                        if f"{shape}|{rows}|{named(trial)}" in crashed:
                            continue

                        def run(each, trial=trial, given=given, use=use):
                            return linear(given, each, **use, in_segments=True, ring=trial)

                        work.append((shape, rows, trial, run, weights, use))

        def outputs(run, weight, use) -> list:
            if "rotary" not in use:
                return [run(weight).clone()]
            caches = use["rotary"].k_cache, use["rotary"].v_cache
            for cache in caches:
                cache.zero_()
            return [run(weight).clone(), *(cache.clone() for cache in caches)]

        failed = 0
        for now in (family,):
            expected, graphs = {}, {}
            try:
                with parallel_compile():
                    for shape, _, _, run, weights, _ in work:
                        if shape == now:
                            run(weights[0])
            except Exception as problem:  # compiled again, one at a time, below
                tell(note=f"together: {str(problem)[-200:]}")
            for at, (shape, rows, trial, run, weights, use) in enumerate(work):
                if shape != now:
                    continue
                name = named(trial)
                tell(trying=f"{shape}|{rows}|{name}")
                try:
                    with gpu(folder):
                        if (shape, rows) not in expected:
                            with patch("paceline.models.triton.linear.streams", lambda *_: False):  # expanded
                                expected[shape, rows] = outputs(run, weights[1], use)
                        got = outputs(run, weights[1], use)
                        torch.cuda.synchronize()
                        same = all(map(torch.equal, got, expected[shape, rows]))
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            for each in weights:
                                run(each)
                        graphs[at] = graph, len(weights), same
                except Exception as problem:
                    if any(word in str(problem) for word in ("CUDA error", "illegal", "CUDA driver")):
                        raise
                    failed += 1
                    tell(shape=shape, rows=rows, trial=name, us=None, why=str(problem)[-160:])
            times: dict[int, list[float]] = {at: [] for at in graphs}
            with gpu(folder):
                for turn in range(7):
                    for at, (graph, count, _) in graphs.items():
                        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
                        if turn == 0:
                            graph.replay()
                        begin.record()
                        graph.replay()
                        end.record()
                        end.synchronize()
                        times[at].append(1e3 * begin.elapsed_time(end) / count)
            for at, (_, _, same) in graphs.items():
                shape, rows, trial, _, weights, _ = work[at]
                us = statistics.median(times[at])
                tell(
                    shape=shape, rows=rows, trial=named(trial), us=us, same=same, least=min(times[at]),
                    gbs=1e-3 * weights[0].nbytes / us, fields=None if trial is None else trial.__dict__,
                )  # fmt: skip
            if graphs:
                tell(finished=now)
    tell(note=f"done after {time.perf_counter() - started:.0f} s, {failed} failed")


def passes(kind: str, folder: pathlib.Path) -> None:
    import torch
    from gpu_passes import Bench, device_ms
    from gpu_weights import SIZE, Coded

    from paceline.config import ModelConfig
    from paceline.models.decoder import Decoder
    from paceline.models.graphs import PassGraphs
    from paceline.models.kernels import kernels_for
    from paceline.models.triton import codes
    from paceline.models.triton.codes import Ring
    from paceline.models.weights import Dtypes

    device, started = torch.device("cuda"), time.perf_counter()
    found = open(folder / f"passes-{kind}.jsonl", "a", buffering=1)  # noqa: SIM115
    config = ModelConfig(
        architecture="llama", vocab_size=49152, hidden_size=SIZE.hidden, intermediate_size=SIZE.intermediate,
        num_layers=SIZE.layers, num_heads=SIZE.heads, num_kv_heads=SIZE.kv_heads, head_dim=SIZE.head_dim,
        max_positions=8192, tie_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)

    def note(**row) -> None:
        found.write(json.dumps({"kind": kind, **row}) + "\n")

    with torch.inference_mode():
        decoder = Decoder(
            config, Coded(config, kind), kernels_for(device), device=device, dtypes=Dtypes.of(None, device, None)
        )
        bench = Bench(decoder, 1024 + 64)
        tokens = torch.randint(0, 500, (64,)).to(device)
        plans = {rows: bench.chain(1024, rows) for rows in ROWS}
        logits = {"default": {}, "best": {}}
        for rows in ROWS:
            bench.forward(tokens[:rows], plans[rows])
            logits["default"][rows] = bench.forward(tokens[:rows], plans[rows]).clone()
        note(note=f"passes: ready after {time.perf_counter() - started:.0f} s")
        while not (folder / "best.json").exists():
            time.sleep(0.2)
        for key, fields in json.loads((folder / "best.json").read_text()).items():
            _, n, k, rows = key.split()
            BEST[int(n), int(k), int(rows)] = Ring(**fields)
        plain = codes.ring_for

        def best(rows, n, k, kind, group):
            bucket = next((count for count in TRIED if rows <= max(count, 8)), 0)
            found = BEST.get((n, k if n != 4096 else 2 * k, bucket))
            return found or plain(rows, n, k, kind, group)

        codes.ring_for = best
        graphs = {"default": decoder.graphs, "best": PassGraphs(decoder)}
        decoder.graphs = graphs["best"]
        with gpu(folder):
            for rows in ROWS:
                bench.forward(tokens[:rows], plans[rows])
                logits["best"][rows] = bench.forward(tokens[:rows], plans[rows]).clone()
        ms = {name: {rows: [] for rows in ROWS} for name in graphs}
        for _ in range(3):
            for name, each in graphs.items():
                decoder.graphs = each
                with gpu(folder):
                    for rows in ROWS:
                        way = lambda rows=rows: bench.forward(tokens[:rows], plans[rows])  # noqa: E731
                        ms[name][rows].append(device_ms(way, 20, 3))
        for name in graphs:
            note(passes=name, ms={rows: round(min(each), 3) for rows, each in ms[name].items()})
        same = {rows: torch.equal(logits["default"][rows], logits["best"][rows]) for rows in ROWS}
        note(note=f"logits as before: {same}")
        alone = torch.cat([bench.forward(tokens[at : at + 1], bench.chain(1024 + at, 1)).clone() for at in range(8)])
        together = bench.forward(tokens[:8], bench.chain(1024, 8))
        note(note=f"best: 8 rows as each alone: {torch.equal(together, alone)}")


def lines_of(folder: pathlib.Path) -> list[dict]:
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def show(rows: list[dict], kinds: list[str]) -> dict[str, dict]:
    """Tables by kind and shape; the best of each, by rows."""
    from gpu_weights import LINEARS

    best: dict[str, dict] = {}
    for kind in kinds:
        for shape, (n, k) in LINEARS.items():
            here = [row for row in rows if row.get("shape") == shape and row["kind"] == kind]
            cells: dict[str, dict[int, str]] = {}
            for row in here:
                mark = "" if row.get("same") else "!" if row["us"] else ""
                text = f"{row['us']:.1f}{mark}" if row["us"] else "fail"
                cells.setdefault(row["trial"], {})[row["rows"]] = text
            print(f"{kind} {shape} {n} x {k}; us at {TRIED} rows; !: other bits")
            order = sorted(cells, key=lambda name: (name != "default", min(
                (row["us"] or 1e9 for row in here if row["trial"] == name), default=1e9)))  # fmt: skip
            for name in order:
                print(f"  {name:<22}" + "".join(f"{cells[name].get(count, '.'):>7}" for count in TRIED))
            for count in TRIED:
                fit = [row for row in here if row["rows"] == count and row.get("same") and row["us"]]
                winner = min(fit, key=lambda row: row["us"], default=None)
                if winner is not None and winner["fields"] is not None:
                    best[f"{kind} {n} {k} {count}"] = winner["fields"]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--kinds", nargs="+", default=["int4", "fp8"])
    parser.add_argument("--families", nargs="+", default=["qkv", "o", "gate_up", "down"])
    parser.add_argument("--child", nargs=3)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    if args.child:
        family, kind, folder = args.child[0], args.child[1], pathlib.Path(args.child[2])
        try:
            (passes(kind, folder) if family == "passes" else child(family, kind, folder))
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        return
    started = time.perf_counter()
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "lock").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])}
    names = [("passes", kind) for kind in args.kinds] + [(f, kind) for f in args.families for kind in args.kinds]
    children, again = {}, {name: 3 if name[0] == "passes" else 0 for name in names}

    def start(family: str, kind: str) -> None:
        log = open(folder / f"{family}-{kind}.log", "a")  # noqa: SIM115
        command = [sys.executable, str(HERE), "--child", family, kind, str(folder)]
        children[family, kind] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    for name in names:
        start(*name)

    def wait_for(which, until: float) -> None:
        while time.perf_counter() - started < until and any(
            children[name].poll() is None or (children[name].poll() and again[name] < 3) for name in which
        ):
            for name in which:
                if children[name].poll() and again[name] < 3:  # without the variant that ended it
                    again[name] += 1
                    start(*name)
            time.sleep(0.2)

    some = [name for name in children if name[0] != "passes"]
    wait_for(some, args.seconds - 30)
    for name in some:
        if children[name].poll() is None:
            children[name].kill()
            print("stopped:", *name)
    best = show(lines_of(folder), args.kinds[::-1])  # the first kind is nearest to the end
    (folder / "best.part").write_text(json.dumps(best))
    (folder / "best.part").rename(folder / "best.json")
    print("best:", {key: named(argparse.Namespace(**fields)) for key, fields in best.items()}, flush=True)
    wait_for([name for name in children if name[0] == "passes"], args.seconds)
    for process in children.values():
        if process.poll() is None:
            process.kill()
    for row in lines_of(folder):
        if "passes" in row or "note" in row:
            print(json.dumps(row))
        elif "why" in row:
            print("failed:", row["kind"], row["shape"], row["rows"], row["trial"], row["why"][:110])
    for name, process in children.items():
        if process.returncode:
            print("exit", process.returncode, *name, (folder / f"{name[0]}-{name[1]}.log").read_text()[-500:])
    print(f"{time.perf_counter() - started:.0f} s")
    if "OUT" in os.environ:
        text = "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))
        (pathlib.Path(os.environ["OUT"]) / "trials.jsonl").write_text(text)


if __name__ == "__main__":
    main()
