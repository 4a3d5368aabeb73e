"""Rate and peak memory of checkpoint conversions, beside a plain copy of the same bytes.

Writes a synthetic dense checkpoint into ``--folder``, then in turns: a buffered copy with fsync,
HF -> HF, HF -> mp_rank (TP2 x PP2), mp_rank -> HF. Each in a process of its own, the files that it
reads evicted from the page cache before. Results must be bit-equal. The folder is removed.

Rates are bytes of the checkpoint over seconds without the start of the interpreter. Peak memory is
that of the process over what it has after its imports; mapped pages of source files count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mindspeed_rl.conversion.command import run_conversion
from mindspeed_rl.conversion.options import parse_options
from mindspeed_rl.platforms.host_memory import peak_bytes, reset_peak_bytes

HIDDEN, FFN, HEADS, VOCAB = 4096, 12288, 32, 32000
COPY_BYTES = 16 << 20


def config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.norm.weight": (HIDDEN,)}
    found |= {f"{name}.weight": (VOCAB, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        rows = {"q": 4096, "k": 1024, "v": 1024}
        found |= {f"{at}self_attn.{p}_proj.weight": (n, HIDDEN) for p, n in rows.items()}
        found[f"{at}self_attn.o_proj.weight"] = (HIDDEN, 4096)
        found |= {f"{at}self_attn.{p}_norm.weight": (128,) for p in "qk"}
        found |= {f"{at}mlp.{p}_proj.weight": (FFN, HIDDEN) for p in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (HIDDEN, FFN)
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {f"{at}{norm}.weight": (HIDDEN,) for norm in norms}
    return found


def write_model(folder: Path, layers: int) -> int:
    """Random weights in files of about 1 GB; their bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(layers)))
    noise = torch.randn(1 << 24).to(torch.bfloat16)
    groups: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}
    filled = total = 0
    names = list(shapes(layers).items())
    for i, (name, shape) in enumerate(names):
        count = torch.Size(shape).numel()
        repeats = -(-count // noise.numel())
        groups[-1][name] = (noise.repeat(repeats)[:count].roll(i)).view(shape)
        filled, total = filled + 2 * count, total + 2 * count
        if filled > 1e9 or i == len(names) - 1:
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(groups[-1], folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(groups[-1], file)
            groups, filled = [{}], 0
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def evict(folder: Path) -> None:
    for path in (p for p in folder.rglob("*") if p.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_copy(source: Path, target: Path) -> None:
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as reader, place.open("wb") as writer:
            shutil.copyfileobj(reader, writer, COPY_BYTES)
            writer.flush()
            os.fsync(writer.fileno())


def child(argv: list[str]) -> None:
    """One task; its seconds and memory as JSON."""
    reset_peak_bytes()  # getrusage would count the parent's
    before = peak_bytes()
    start = time.monotonic()
    if argv[0] == "copy":
        plain_copy(Path(argv[1]), Path(argv[2]))
    else:
        run_conversion(parse_options([*argv, "--no-progress"]), lambda line: None)
    seconds = time.monotonic() - start
    peak = peak_bytes()
    print(json.dumps({"seconds": seconds, "peak_mib": (peak - before) / 2**20}))


def run(argv: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", *argv]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def equal(left: Path, right: Path) -> bool:
    """The same tensors, bit for bit, whatever the files."""

    def tensors(folder: Path) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found

    ours, theirs = tensors(left), tensors(right)
    if ours.keys() != theirs.keys():
        return False
    for name in ours:
        with safe_open(ours[name], "pt") as a, safe_open(theirs[name], "pt") as b:
            pair = [f.get_tensor(name).view(torch.int16) for f in (a, b)]
            if not torch.equal(*pair):
                return False
    return True


def measure(folder: Path, layers: int, rounds: int, workers: int) -> None:
    hf, copied = folder / "hf", folder / "copied"
    resharded, mg, back = folder / "resharded", folder / "mg", folder / "back"
    size = write_model(hf, layers)
    largest = max(torch.Size(s).numel() * 2 for s in shapes(layers).values()) / 2**20
    print(f"checkpoint: {size / 1e9:.2f} GB; largest tensor: {largest:.0f} MiB")
    print(f"workers: {workers}")
    to = ["--workers", str(workers)]
    halves = f"{layers // 2},{layers - layers // 2}"
    layout = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2",
              "--num-layer-list", halves]  # fmt: skip
    tasks = {
        "copy": (hf, copied, ["copy", str(hf), str(copied)]),
        "HF -> HF": (hf, resharded, ["--save-model-type", "hf", "--load-dir", str(hf),
                                     "--save-dir", str(resharded), *to]),
        "HF -> mp_rank": (hf, mg, ["--load-dir", str(hf), "--save-dir", str(mg), *layout, *to]),
        "mp_rank -> HF": (mg, back, ["--load-model-type", "mg", "--save-model-type", "hf",
                                     "--load-dir", str(mg), "--hf-cfg-dir", str(hf),
                                     "--save-dir", str(back), *to]),
    }  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in tasks}
    peaks: dict[str, float] = {}
    for turn in range(rounds):
        for target in (copied, resharded, mg, back):
            shutil.rmtree(target, ignore_errors=True)
        for name, (source, target, argv) in tasks.items():
            evict(source)
            found = run(argv)
            rates[name].append(size / 1e6 / found["seconds"])
            print(f"  {name}: {found['seconds']:.1f} s", flush=True)
            peaks[name] = max(peaks.get(name, 0.0), found["peak_mib"])
            if target in (resharded, back):
                assert equal(hf, target), f"{name}: not bit-equal"
            if target in (copied, resharded):
                shutil.rmtree(target)
        print(f"round {turn + 1}: " + ", ".join(f"{n} {r[-1]:.0f} MB/s" for n, r in rates.items()))
    base = median(rates["copy"])
    print("bit-equal: HF -> HF and HF -> mp_rank -> HF")
    for name, rounds_of in rates.items():
        middle = median(rounds_of)
        print(f"{name:14} {middle:7.0f} MB/s {middle / base:6.2f} of the copy, "
              f"peak {peaks[name]:.0f} MiB")  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="Made, and removed at the end.")
    parser.add_argument("--layers", type=int, default=9, help="9 make about 4 GB.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"--folder {args.folder} exists")
    try:
        measure(args.folder, args.layers, args.rounds, args.workers)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
