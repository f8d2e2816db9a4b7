"""Change one line of the package at a time, in a copy, and say whether the tests of its room notice.

python tests/support/mutants.py                   all of them, some ten minutes
python tests/support/mutants.py varlen kernels    only mutants whose path or change contains one of these words
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("liger_trainer", "kernels", "tests", "recipes", "configs", "benchmarks", "docs", "pyproject.toml")
T = "tests/liger_trainer/"
# (file, text that occurs in it once, its replacement, the tests of its room)
MUTANTS = (
    ("liger_trainer/head/recorded.py", "now is not None and now != version", "False", T + "head"),
    ("liger_trainer/head/recorded.py", "abs(logits.softcap * scale)", "logits.softcap * scale", T + "head"),
    ("liger_trainer/head/answers.py", "if _gradient_modes() != self._gradient_modes:", "if False:", T + "head"),
    ("liger_trainer/head/answers.py", "count = mask.sum().clamp(min=1)", "count = mask.sum()", T + "head"),
    ("liger_trainer/head/module.py", "        if outer is not None:", "        if False:", T + "head"),
    ("liger_trainer/varlen/plan_batch.py", "(runs > 1).any() or ", "", T + "varlen/test_padding.py"),
    ("liger_trainer/varlen/plan_batch.py", "(predicting & ~real).any()", "False", T + "varlen/test_padding.py"),
    (
        "liger_trainer/varlen/unpad_plan.py",
        "if not (known and of_tokens):",
        "if not of_tokens:",
        T + "varlen/test_padding.py",
    ),
    ("liger_trainer/varlen/unpad_plan.py", "(self.index % length)", "self.index", T + "varlen/test_padding.py"),
    (
        "liger_trainer/varlen/attention.py",
        "(distance < window)",
        "(distance <= window)",
        T + "varlen/test_varlen_attention.py",
    ),
    ("liger_trainer/varlen/host_copies.py", "copy.version != x._version", "False", T + "varlen/test_host_copies.py"),
    (
        "liger_trainer/patching/norms.py",
        'norm.autocast == "own" and torch',
        "False and torch",
        T + "patching/test_gated_variants.py " + T + "patching/test_patching_probe.py",
    ),
    (
        "liger_trainer/patching/mlps.py",
        "if len(args) + len(named) != 1 and any",
        "if False and any",
        T + "patching/test_gated_variants.py " + T + "patching/test_patching_probe.py",
    ),
    (
        "liger_trainer/patching/rotary.py",
        "if widths is not None and cos",
        "if False and cos",
        T + "patching/test_patching_probe.py",
    ),
    ("liger_trainer/patching/rotary.py", "attached = hook_on(part)", "attached = None", T + "patching/core"),
    (
        "liger_trainer/patching/core/guards.py",
        "if getattr(module, name, None) is not None:",
        "if False:",
        T + "patching/core",
    ),
    (
        "liger_trainer/patching/core/guards.py",
        "if not home(function).startswith(KNOWN):",
        "if False:",
        T + "patching/core",
    ),
    (
        "liger_trainer/patching/core/hooks.py",
        ".values(), *global_hooks.values()):",
        ".values(),):",
        T + "patching/core",
    ),
    (
        "liger_trainer/memory/rebuild.py",
        "is_contiguous() and tensor._version == self.version",
        "is_contiguous()",
        T + "memory/test_rebuild.py " + T + "patching/core/test_hooks.py",
    ),
    (
        "liger_trainer/memory/selective.py",
        "if kind is func and version == _version(out):",
        "if kind is func:",
        T + "memory/test_selective.py",
    ),
    (
        "liger_trainer/memory/plan.py",
        "            if grown[i] > limit:",
        "            if grown[i] < limit:",
        T + "memory/test_plan.py",
    ),
    (
        "liger_trainer/trainers/trainer.py",
        "loss + self._aux_loss_weight() * outputs",
        "loss + 0 * outputs",
        T + "trainers/test_custom_loss.py " + T + "trainers/test_router_losses.py",
    ),
    (
        "liger_trainer/trainers/features.py",
        "steps = 1 + trainer",
        "steps = trainer",
        T + "trainers/test_logged_losses.py",
    ),
    (
        "liger_trainer/trainers/sft_trainer.py",
        "self.router_aux_loss_coef = 0.0",
        "pass",
        T + "trainers/test_router_losses.py " + T + "trainers/test_parity_sft.py",
    ),
    (
        "liger_trainer/trainers/renamed_weights.py",
        "if _names_in(checkpoint) <= ",
        "if True or ",
        T + "trainers/test_checkpoints.py",
    ),
    (
        "liger_trainer/trainers/scored_pairs.py",
        "if (wanted & (labels != self.target)).any():",
        "if False:",
        T + "trainers/test_parity_orpo.py",
    ),
    (
        "liger_trainer/trainers/optimizer_in_backward.py",
        "    torch.autograd.graph.increment_version(weight)",
        "    pass",
        T + "trainers/test_optimizer_in_backward.py",
    ),
    (
        "liger_trainer/lora/peft_state.py",
        'state["_disable_adapters"] or state["merged_adapters"]',
        'state["_disable_adapters"]',
        T + "lora",
    ),
    (
        "liger_trainer/lora/layers.py",
        "    reason = _hook_reason(called_by(layer, adapters))",
        "    reason = None",
        T + "lora",
    ),
    (
        "liger_trainer/fp8/frozen_layer.py",
        "        if bits.dtype != _CODES or scale.dtype != torch.float32:",
        "        if False:",
        T + "fp8/test_frozen_float8.py",
    ),
    (
        "liger_trainer/head/targets.py",
        "positions[:, :-ahead] + ahead)",
        "positions[:, :-ahead] + 1)",
        T + "medusa/test_medusa_loss.py",
    ),
    (
        "liger_trainer/medusa/loss.py",
        "return lm.loss + scores.loss",
        "return scores.loss",
        T + "medusa/test_medusa_loss.py",
    ),
    ("liger_trainer/losses/preference.py", ".detach().clamp(min=0)", ".detach()", T + "losses"),
    ("liger_trainer/losses/preference.py", "    x = x.clamp(max=-torch.finfo(x.dtype).tiny)", "    pass", T + "losses"),
    (
        "liger_trainer/command/run/output_dir.py",
        '    if wanted in ("true", "auto") or ',
        "    if True or ",
        f"{T}command/run/test_checkpoints.py {T}command/recipe/test_checks.py {T}command/run/test_run_life.py",
    ),
    (
        "liger_trainer/command/rows/checks.py",
        "(kinds[column],) if column in kinds else wanted",
        "wanted",
        T + "command/rows/test_checks.py",
    ),
    (
        "kernels/liger_triton/known_gradients.py",
        "torch.where(low == high, low, torch.nan)",
        "low",
        "tests/kernels/test_linear_cross_entropy.py tests/kernels/test_linear_logprobs.py",
    ),
    (
        "kernels/liger_triton/gates.py",
        "dg = tl.where(g_cut, 0.0, dy",
        "dg = tl.where(False, 0.0, dy",
        "tests/kernels/test_gates.py",
    ),
    (
        "kernels/liger_triton/row_attention.py",
        "near & (query - key < window)",
        "near & (query - key <= window)",
        "tests/kernels/test_row_attention.py",
    ),
    (
        "liger_trainer/varlen/decide.py",
        "if bound.proven.keeps_state and holds_packed_rows(call):",
        "if False:",
        T + "varlen/test_states.py",
    ),
    (
        "liger_trainer/varlen/state_layers.py",
        "for name, value in call.items() if name not in _ROW_ARGUMENTS}",
        "for name, value in call.items()}",
        T + "varlen/test_states.py",
    ),
    (
        "kernels/liger_triton/_short_conv_kernels.py",
        "_in_row(g, token - (K - 1) + k, start, PLAIN)",
        "g",
        "tests/kernels/test_short_conv.py",
    ),
    (
        "liger_trainer/varlen/proof/rules.py",
        "offsets.view_as(offsets)",
        "offsets",
        T + "varlen/graphs/test_captured_states.py",
    ),
    (
        "liger_trainer/varlen/graphs/graph_capture.py",
        "self._compare(self._results_of(self._replay, random_state), wanted_of_other)",
        "pass",
        T + "varlen/graphs/test_captured_states.py",
    ),
    (
        "kernels/liger_triton/_short_conv_kernels.py",
        "tl.where(is_first, width, tl.where(is_before_third, width + width_2, c))",
        "c",
        "tests/kernels/test_short_conv_split.py",
    ),
    (
        "kernels/liger_triton/_chunks.py",
        "if lean and like.dtype != torch.float16 else",
        "if lean else",
        "tests/kernels/test_linear_cross_entropy.py tests/kernels/test_float64.py",
    ),
    (
        "kernels/liger_triton/_routed.py",
        "expert = tl.sum((last <= tile)",
        "expert = tl.sum((last < tile)",
        "tests/kernels/test_experts.py",
    ),
    (
        "liger_trainer/varlen/decide.py",
        "if proven.padding_reason is not None and not asked.has_no_padding:",
        "if False:",
        T + "varlen/test_windows.py",
    ),
    ("liger_trainer/varlen/decide.py", "if why is None and not unchanged:", "if False:", T + "varlen/test_as_it_is.py"),
    (
        "liger_trainer/varlen/decide.py",
        "if proven.no_capture_reason is not None:",
        "if False:",
        T + "varlen/graphs/test_captured_per_layer.py",
    ),
    (
        "liger_trainer/varlen/graphs/input_embeddings.py",
        "        if ids is None:",
        "        if False:",
        T + "varlen/graphs/test_captured_per_layer.py",
    ),
    (
        "liger_trainer/mtp/rollout.py",
        "run_layer(predictor, x, token + guess - 1,",
        "run_layer(predictor, x, token,",
        T + "mtp/test_mtp_evaluate.py",
    ),
)


def noticed(copy: Path, tests: str, folder: str) -> str | None:
    """Return the first of `tests` that fails in the copy, or the signal that ends them, or None if all pass."""
    paths = os.pathsep.join(map(str, (copy, copy / "kernels")))
    env = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": folder}
    if tests.startswith("tests/kernels"):
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    run = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    if run.returncode < 0:  # such as SIGSEGV
        return f"signal {-run.returncode}"
    if run.returncode != 1:
        return None
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split()[1]


def main(words: list[str]) -> int:
    chosen = MUTANTS
    if words:
        chosen = [mutant for mutant in MUTANTS if any(word in f"{mutant[0]}\n{mutant[1]}" for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        for name in COPIED:
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        for name, line, other, tests in chosen:
            path = copy / name
            text = path.read_text()
            if text.count(line) != 1:
                raise SystemExit(f"{name} has {text.count(line)} times {line!r}; expected it once.")
            path.write_text(text.replace(line, other))
            failed = noticed(copy, tests, folder)
            path.write_text(text)
            missed += failed is None
            result = "NOT FOUND" if failed is None else "found    "
            print(f"{result} {name}: {line.strip()!r} -> {other.strip()!r}", flush=True)
            if failed is not None:
                print(f"          by {failed}", flush=True)  # a test that fails without the change has found nothing
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
