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
import importlib.util
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
from dataclasses import dataclass

ROWS = (1, 4, 16, 64)
NARROW = ("qkv", "o", "down")
HERE = pathlib.Path(__file__).resolve()


@dataclass(frozen=True)
class Trial:
    family: str  # "base", "nofence", "boxed", "direct"
    n: int = 64
    unroll: int = 8  # of direct: steps held in registers
    stages: int = 4
    warps: int = 4
    lag: int = 1
    early: bool = True
    special: bool = False
    without: str = ""
    cache: str = ""
    m: int = 0  # 0: as the rows need

    def __str__(self) -> str:
        """base: b, nofence: f, boxed: t (by the copy engine), special: s (with a warp of its own), direct: d."""
        letter = {"base": "b", "nofence": "f", "boxed": "t", "direct": "d"}[self.family]
        name = f"{'s' if self.special else letter}{self.n} {self.unroll}x{self.stages}"
        name += f" w{self.warps}" * (self.warps != 4) + f" lag{self.lag}" * (self.lag != 1) + " late" * (not self.early)
        return name + f" m{self.m}" * bool(self.m) + self.cache + f" -{self.without}" * bool(self.without)


def trials(family: str, kind: str, shape: str, rows: int) -> list[Trial]:
    """`family`: of a process."""
    wide, many, fp8 = shape == "gate_up", rows > 16, kind == "fp8"
    few = rows <= 8
    if family == "base":
        if many:
            return [Trial("base", 128, 2, 4), Trial("base", 64, 4, 3)][:1 if wide else 2]
        if wide:
            size, other = (128, 2 if fp8 else 4, 4), Trial("base", 128, 4, 4, 8, m=8 if few else 16)
        else:
            size, other = (64, 8, 3 if fp8 else 4), Trial("base", 64, 4, 4, m=8 if few else 16)
        return [Trial("base", *size, m=8 if few else 16), Trial("nofence", *size), other]
    if family == "direct":
        if many:
            return []
        depth = 8 if fp8 else 16
        if wide:
            return [
                Trial("direct", 128, depth // 2), Trial("direct", 128, depth, warps=8),
                Trial("direct", 128, depth // 2, warps=8), Trial("direct", 256, depth // 2, warps=8),
            ]  # fmt: skip
        found = [Trial("direct", 64, depth), Trial("direct", 64, depth, cache=".cg"), Trial("direct", 64, depth // 2)]
        return [*found, Trial("direct", 64, depth, without="products")] if rows == 1 else found
    special = family == "special"
    if many != (family == "many") and not special:
        return []
    if many:
        sizes = [(64, 2, 6, 4), (64, 4, 3, 4)] if not wide else [(128, 2, 4, 8), (256, 2, 3, 8)]
        sizes += [(128, 2, 4, 4), (128, 1, 6, 4), (64, 1, 10, 4)]
    elif wide:
        sizes = [(128, 4, 3, 8), (128, 2, 6, 8), (128, 2, 6, 4), (256, 4, 3, 8), (256, 2, 6, 8)]
        sizes += [(64, 4, 3, 4)] if fp8 else [(128, 4, 4, 4), (64, 4, 4, 4), (128, 8, 3, 8)]
    elif fp8:
        sizes = [(64, 4, 4, 4), (64, 4, 6, 4), (64, 2, 8, 4), (64, 8, 3, 4)]
    else:
        sizes = [(64, 8, 4, 4), (64, 4, 6, 4), (64, 4, 8, 4), (64, 2, 12, 4), (64, 8, 3, 4)]
    if special:
        return [Trial("boxed", *size, special=True) for size in sizes[: 2 if many else 4]]
    first = sizes[0]
    if family == "ablate":
        parts = ("expansion", "products", "both")
        return [Trial("boxed", *first, without=part) for part in parts] if rows == 1 else []
    found = [Trial("boxed", *size) for size in sizes]
    if few and shape != "o":
        found += [Trial("boxed", *first, lag=0), Trial("boxed", *first, lag=2), Trial("boxed", *first, early=False)]
    elif many:
        found += [Trial("boxed", *first, lag=0)]
    if many and shape in ("gate_up", "down"):
        found += [Trial("boxed", *first, without=part) for part in ("expansion", "products", "both")]
    return found


def launcher():
    """What stands in for `launch_streamed`: `ring` may be a Trial; without one BEST has a say."""
    import torch
    import triton
    from gpu_weights_trials_kernels import boxed, direct
    from triton.experimental.gluon.language._layouts import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from paceline.models.triton import codes
    from paceline.models.triton.codes import Ring
    from paceline.models.triton.launch import unfused
    from paceline.models.weights import WeightKind

    plain, fences = codes.launch_streamed, {}

    def without_fence():
        if not fences:
            from paceline.models.triton import streamed

            text = pathlib.Path(streamed.__file__).read_text().replace("        fence_async_shared()", "        pass")
            folder = pathlib.Path(tempfile.mkdtemp())
            (folder / "streamed_nofence.py").write_text(text)
            spec = importlib.util.spec_from_file_location("streamed_nofence", folder / "streamed_nofence.py")
            fences["module"] = importlib.util.module_from_spec(spec)
            sys.modules["streamed_nofence"] = fences["module"]
            spec.loader.exec_module(fences["module"])
        return fences["module"]

    def launch(x, weight, into, ring, rotary, **options):
        rows, k = x.shape
        stored = weight.weight
        n, kind = stored.shape[0], stored.kind
        trial = ring
        if ring is None:
            bucket = next((count for count in ROWS if rows <= count), 0)
            trial = BEST.get((kind.label, n, k, bucket))
        if not isinstance(trial, Trial):
            return plain(x, weight, into, trial, rotary, **options)
        m = trial.m or max(8, triton.next_power_of_2(rows))
        if trial.family in ("base", "nofence"):
            ring = Ring(max(m, 16) if not trial.m else m, trial.n, trial.unroll, trial.stages, trial.warps)
            if trial.family == "base":
                return plain(x, weight, into, ring, rotary, **options)
            kept, codes.streamed = codes.streamed, without_fence()
            try:
                return plain(x, weight, into, ring, rotary, **options)
            finally:
                codes.streamed = kept
        gated, dim, kv_heads = options["GATED"], options["DIM"], options["KV_HEADS"]
        segments, apart = options["SEGMENTS"], options["APART"]
        nibbles = kind is WeightKind.INT4
        group = k // len(stored.scales) if nibbles else 0
        bias = x if weight.bias is None else weight.bias
        shared = {
            "KIND": 2 if nibbles else 0, "GROUP": group, "BM": m, "BN": trial.n, "GATED": gated, "DIM": dim,
            "KV_HEADS": kv_heads, "BIASED": options["BIASED"], "APART": apart, "WARPS": trial.warps,
            "OVERLAP": options["OVERLAP"], "LAG": trial.lag, "WITHOUT": trial.without, "num_warps": trial.warps,
            **unfused(),
        }  # fmt: skip
        if "launch_pdl" in options:
            shared["launch_pdl"] = options["launch_pdl"]
        grid = (triton.cdiv(rows, m) * triton.cdiv(n, trial.n), segments if apart else 1)
        if trial.family == "direct":
            assert rows <= m
            scales = stored.scales.view(torch.int32) if nibbles else stored.scales
            direct[grid](
                x, stored.data.view(torch.int32), scales, bias, into, rows, n, k, *(rotary or (x,) * 6),
                DEPTH=trial.unroll, LENGTH=k // segments, CACHE=trial.cache, PIN=4 if nibbles else 2, **shared,
            )  # fmt: skip
            return None
        unit = 64 if nibbles else 32
        parts, strips = trial.unroll * (64 // unit), trial.n // 16
        inner = n // 32 if gated else dim // 32 if kv_heads else n // 16
        two = 2 if gated or kv_heads else 1
        x_box = TensorDescriptor(
            x, [k // 64, rows, 64], [64, k, 1], [trial.unroll, m, 64], NVMMASharedLayout(128, 16, 3)
        )
        code_box = TensorDescriptor(
            stored.data.view(torch.int8), [k // unit, n // 16 // inner, inner, 4, 128],
            [512, inner * (k // unit) * 512, k // unit * 512, 128, 1], [parts, two, strips // two, 4, 128],
            NVMMASharedLayout(128, 8, 5),
        )  # fmt: skip
        scale_box = stored.scales
        if nibbles:
            scale_box = TensorDescriptor(
                stored.scales, [k // group, n // 16 // inner, inner, 2, 8], [n, inner * 16, 16, 8, 1],
                [max(trial.unroll * 64 // group, 1), two, strips // two, 2, 8], NVMMASharedLayout(0, 16, 5),
            )  # fmt: skip
        boxed[grid](
            x_box, code_box, scale_box, stored.scales, bias, into, rows, n, k, *(rotary or (x,) * 6),
            UNROLL=trial.unroll, STAGES=trial.stages, SEGMENTS=segments, EARLY=trial.early, SPECIAL=trial.special,
            **shared,
        )  # fmt: skip
        return None

    return launch


BEST: dict[tuple[str, int, int, int], Trial] = {}


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

    from paceline.models.triton import linear as products
    from paceline.models.triton.linear import linear
    from paceline.models.triton.parallel_compile import parallel_compile
    from paceline.models.triton_kernels import TritonKernels
    from paceline.models.weights import Linear

    products.launch_streamed = launcher()
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
                if shape in finished:
                    continue
                first = kernels.pack(made(kind, n, k)).weight
                copies = math.ceil(200e6 / first.nbytes)
                several = [first]
                for _ in range(copies - 1):
                    data = first.data.flatten().roll(int(torch.randint(1, 1 << 20, ())) * 16).view(first.data.shape)
                    several.append(type(first)(first.kind, data, first.shape, first.scales.clone(), None, None))
                weights = [Linear(each, None) for each in several]
                x = torch.randn(64, k, device=device).to(torch.bfloat16)
                for rows in ROWS:
                    use = dict(uses(LINEARS, SIZE.head_dim, SIZE.kv_heads, rows))[shape]
                    given = x[:rows].contiguous()
                    ways = [None] if family == "base" else []
                    for trial in [*ways, *trials(family, kind, shape, rows)]:
                        if f"{shape}|{rows}|{trial or 'default'}" in crashed:
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
        for now in ("down", "qkv", "gate_up", "o"):
            expected, graphs = {}, {}
            try:
                with parallel_compile():
                    for shape, _, _, run, weights, _ in work:
                        if shape == now:
                            run(weights[0])
                            run(weights[0], trial=None)
            except Exception as problem:  # compiled again, one at a time, below
                tell(note=f"together: {str(problem)[-200:]}")
            for at, (shape, rows, trial, run, weights, use) in enumerate(work):
                if shape != now:
                    continue
                name = str(trial or "default")
                tell(trying=f"{shape}|{rows}|{name}")
                try:
                    with gpu(folder):
                        if (shape, rows) not in expected:
                            default = lambda each, run=run: run(each, trial=None)  # noqa: E731
                            expected[shape, rows] = outputs(default, weights[1], use)
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
                    shape=shape, rows=rows, trial=str(trial or "default"), us=us, same=same, least=min(times[at]),
                    gbs=1e-3 * weights[0].nbytes / us, fields=None if trial is None else trial.__dict__,
                )  # fmt: skip
            if graphs:
                tell(finished=now)
        if family == "base" and kind == "int4":  # would the other tensor core instruction give the same bits?
            from paceline.models.triton.linear import Tile

            n, k = LINEARS["o"]
            plain = kernels.pack(torch.randn(n, k, device=device).to(torch.bfloat16))
            x = torch.randn(16, k, device=device).to(torch.bfloat16)
            with gpu(folder):
                ours = linear(x, plain, in_segments=True)
                other = linear(x, plain, in_segments=True, tile=Tile(16, 64, 128, 4, 3))
                tell(note=f"mma.sync has wgmma's bits: {torch.equal(ours, other)}")
    tell(note=f"done after {time.perf_counter() - started:.0f} s, {failed} failed")


def passes(kind: str, folder: pathlib.Path) -> None:
    import torch
    from gpu_passes import Bench, device_ms
    from gpu_weights import SIZE, Coded

    from paceline.config import ModelConfig
    from paceline.models.decoder import Decoder
    from paceline.models.graphs import PassGraphs
    from paceline.models.kernels import kernels_for
    from paceline.models.triton import linear as products
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
            label, n, k, rows = key.split()
            BEST[label, int(n), int(k), int(rows)] = Trial(**fields)
        products.launch_streamed = launcher()
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
            print(f"{kind} {shape} {n} x {k}; us at {ROWS} rows; !: other bits")
            order = sorted(cells, key=lambda name: (name != "default", min(
                (row["us"] or 1e9 for row in here if row["trial"] == name), default=1e9)))  # fmt: skip
            for name in order:
                print(f"  {name:<22}" + "".join(f"{cells[name].get(count, '.'):>7}" for count in ROWS))
            for count in ROWS:
                fit = [row for row in here if row["rows"] == count and row.get("same") and row["us"]]
                fit = [row for row in fit if row["fields"] is None or row["fields"]["family"] != "nofence"]
                winner = min(fit, key=lambda row: row["us"], default=None)
                if winner is not None and winner["fields"] is not None:
                    best[f"{kind} {n} {k} {count}"] = winner["fields"]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--kinds", nargs="+", default=["int4", "fp8"])
    parser.add_argument("--families", nargs="+", default=["base", "boxed", "many", "ablate", "special", "direct"])
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
            children[name].poll() is None or children[name].poll() and again[name] < 3 for name in which
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
    print("best:", {key: str(Trial(**fields)) for key, fields in best.items()}, flush=True)
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
