"""`paceline doctor`: this machine, what paceline will use on it, and its problems. It downloads nothing."""

from __future__ import annotations

import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from paceline import __version__
from paceline.cli.flags import Json, option
from paceline.cli.output import human_bytes, one_line, print_json
from paceline.errors import CacheFolderError, InvalidParameter
from paceline.platform import cpu as machine

EXACT = "yes: a drafted answer equals the plain one, token for token"
NOT_EXACT = "no: a drafted answer may differ from the plain one where two tokens are nearly as likely"
UNIVERSAL_READY = "in the cache: on a CPU it drafts for models of five times its size and more (--draft-model none)"
UNIVERSAL_MISSING = "not in the cache: paceline pull universal fetches a drafter for any larger model"
FAILS = ("fatal", "slow", "damaged")  # fields of a finding with which the command fails
LITTLE_MEMORY = 1 << 30  # bytes; torch, the default model in fp32 and a small cache


@dataclass(frozen=True)
class Finding:
    """A problem. `fatal`: no model can run; `slow`: models run, several times slower than they could; `damaged`: a
    model is not what was pulled."""

    problem: str
    advice: str
    fatal: bool = False
    slow: bool = False
    damaged: bool = False


def doctor(
    verify: Annotated[bool, option("Compare the files of pulled models with their checksums.")] = False,
    json: Json = False,
) -> int:
    """Show this machine, what will be used, and any problems."""
    report = examine(verify=verify)
    if json:
        print_json(report)
    else:
        print("\n".join(render(report)))
    return 1 if any(finding[name] for finding in report["findings"] for name in FAILS) else 0


def examine(*, verify: bool = False) -> dict[str, Any]:
    findings: list[Finding] = []
    this = this_machine()
    if 0 < this["memory_available"] < LITTLE_MEMORY:
        free = human_bytes(this["memory_available"])
        findings.append(Finding(f"only {free} of memory is free", "close something, or raise the container's limit"))
    cache = cache_folder(findings)
    if verify:
        verify_models(findings)
    home = Path(cache["path"]) if cache["path"] else None
    # Before torch computes anything; a report creates no folder.
    if note := machine.guard_amx(home if home is not None and home.exists() else None):
        findings.append(Finding(note, "nothing to do, paceline handles it at every start"))
    torch = torch_build(findings)
    return {
        "paceline": __version__,
        "machine": this,
        "torch": torch,
        "use": None if torch is None else choices(findings),
        "cache": cache,
        "findings": [asdict(finding) for finding in findings],
    }


def this_machine() -> dict[str, Any]:
    cpuinfo, memory = machine.read_cpuinfo(), machine.memory()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu": machine.cpu_name(cpuinfo),
        "architecture": platform.machine(),
        "isa": machine.isa(cpuinfo),
        "cores": os.cpu_count() or 1,
        "usable_cores": machine.usable_cores(),
        "memory_total": memory.total,
        "memory_available": memory.available,
    }


def cache_folder(findings: list[Finding]) -> dict[str, Any]:
    from paceline.models.load import hub

    try:
        home, cached = hub.cache_home(), hub.cached_models()
    except CacheFolderError as error:
        findings.append(Finding(one_line(error), "nothing can be pulled until then", fatal=True))
        return {"path": None, "writable": False, "models": [], "universal": False}
    names = [model.name for model in cached]
    problem = _why_unwritable(home)
    if problem is not None:
        advice = "make it writable, or set PACELINE_HOME to a folder that is"
        findings.append(Finding(f"the cache folder {home} cannot be written: {problem}", advice, fatal=not names))
    elif not names:
        findings.append(Finding("no model is cached yet", "paceline pull smollm2 fetches the default one"))
    universal = hub.SAME[hub.UNIVERSAL] in names
    return {"path": str(home), "writable": problem is None, "models": names, "universal": universal}


def verify_models(findings: list[Finding]) -> None:
    from paceline.models.load.checksums import damage
    from paceline.models.load.hub import cached_models

    for model in cached_models():
        if problem := damage(model.path):
            advice = f"remove {model.path} and pull it again"
            findings.append(Finding(f"{model.name}: {problem}", advice, damaged=True))


def _why_unwritable(folder: Path) -> str | None:
    """Write a file and remove it: permission bits do not show read-only mounts."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)


def torch_build(findings: list[Finding]) -> dict[str, Any] | None:
    try:
        import torch
    except Exception as error:  # a broken build raises OSError as well as ImportError
        findings.append(Finding(f"torch cannot be imported: {one_line(error)}", "install it again", fatal=True))
        return None
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append({"name": properties.name, "memory": properties.total_memory})
    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "gpus": gpus}


def choices(findings: list[Finding]) -> dict[str, Any]:
    """Return the values that `auto` stands for on this machine."""
    from paceline.models.kernels import ACTIVATIONS, kernels_for, why_slow
    from paceline.models.load.open_model import OTHER_KV_DTYPES, choose_device, choose_kv_dtype
    from paceline.native.library import library_status

    device = choose_device("auto")
    kernels = kernels_for(device)
    status = library_status() if kernels.name.startswith("native") else kernels.name
    if slow := why_slow(kernels, device):
        findings.append(Finding(f"slow kernels serve: {slow.reason}", slow.advice, slow=True))
        status = f"{kernels.name}, slow: see the findings"
    kv_dtypes = ["auto"]
    for name in OTHER_KV_DTYPES:
        with suppress(InvalidParameter):
            choose_kv_dtype(name, device, kernels)
            kv_dtypes.append(name)
    return {
        "device": device.type,
        "dtype": weights_words(device.type, kernels.keeps_codes),
        "threads": machine.usable_cores(),
        "kernels": kernels.name,
        "kernels_status": status,
        "activations": list(ACTIVATIONS) if kernels.name.startswith("native") else [kernels.activations],
        "kv_dtype": kv_dtypes,
        "exact": kernels.exact,
    }


def weights_words(device: str, keeps_codes: bool) -> str:
    """Say how weights are stored in memory."""
    if device == "cpu":
        return "as stored" if keeps_codes else "float32"
    return "bfloat16, or quantised as stored" if keeps_codes else "bfloat16, quantised ones expanded to it"


def render(report: dict[str, Any]) -> list[str]:
    this, torch, use, cache = report["machine"], report["torch"], report["use"], report["cache"]
    lines = [
        f"paceline {report['paceline']}, Python {this['python']}, {this['system']}",
        f"  cpu         {this['cpu']} ({this['architecture']}: {' '.join(this['isa']) or 'no vector extension known'})",
        f"  cores       {this['usable_cores']} usable of {this['cores']}",
        f"  memory      {human_bytes(this['memory_available'])} free of {human_bytes(this['memory_total'])}",
    ]
    if torch is not None:
        gpus = ", ".join(f"{gpu['name']} ({human_bytes(gpu['memory'])})" for gpu in torch["gpus"])
        lines += [f"  gpu         {gpus or 'none'}", f"  torch       {torch['version']}"]
    lines.append(f"  cache       {cache['path']} ({', '.join(cache['models']) or 'empty'})")
    lines.append(f"  universal   {UNIVERSAL_READY if cache['universal'] else UNIVERSAL_MISSING}")
    if use is not None:
        lines += [
            "will use",
            f"  device      {use['device']}, weights {use['dtype']}, {use['threads']} threads",
            f"  kernels     {use['kernels_status']}",
            f"  exact       {EXACT if use['exact'] else NOT_EXACT}",
            f"  activations {use['activations'][0]}"
            + "".join(f" ({other} with --activations {other})" for other in use["activations"][1:]),
            f"  kv cache    {use['kv_dtype'][0]}" + "".join(f" ({o} with --kv-dtype {o})" for o in use["kv_dtype"][1:]),
        ]
    if not report["findings"]:
        return [*lines, "nothing is wrong"]
    lines.append("findings")
    for finding in report["findings"]:
        mark = "✗" if any(finding[name] for name in FAILS) else "!"
        lines.append(f"  {mark} {finding['problem']} → {finding['advice']}")
    return lines
