"""The disposition of foreign flags: existing pretraining scripts keep working."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import data_flags

from mindspeed_rl.arguments import ENTRIES, own_flags
from mindspeed_rl.compat import Disposition, classify, foreign_flags, nearest
from mindspeed_rl.compat.dispositions import ARITIES, ForeignFlag, Group, table
from mindspeed_rl.config.foreign_architecture import COUNTERPART_OF

OWN = frozenset(
    spelling
    for spelling, flag in foreign_flags().items()
    if flag.disposition is Disposition.HONOURED and spelling == flag.name
) | {"--hf-checkpoint", "--prompt-data", "--rollout-tp", "-h", "--help"}

SMALL = table(
    (
        "test",
        (
            Group(Disposition.HONOURED, "", "--honoured|--alias-of-honoured:1"),
            Group(Disposition.CHECKED_ARCH, "compared", "--arch:1"),
            Group(Disposition.NO_MEANING, "free", "--zero:0 --one:1 --maybe:? --some:+ --any:*"),
            Group(Disposition.REFUSED, "remove it", "--bad:0 --worse:+ --choice:1=good,fine"),
        ),
    )
)


def sort(text: str):
    return classify(text.split(), {"--own", "--own-list", "--honoured", "-h"}, SMALL)


def pairs(used):
    return [(flag.flag, flag.values) for flag in used]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("--zero", ()),
        ("--one -1", ("-1",)),
        ("--one -1.5e-3", ("-1.5e-3",)),
        ("--one=--a=b", ("--a=b",)),
        ("--one=", ("",)),
        ("--maybe", ()),
        ("--maybe 3", ("3",)),
        ("--some a", ("a",)),
        ("--some a -2 b", ("a", "-2", "b")),
        ("--any", ()),
        ("--any a b", ("a", "b")),
        ("--any=a", ("a",)),
    ],
)
@pytest.mark.parametrize("after", ["", " --own 4", " -h"])
def test_every_arity_takes_its_values(text, values, after):
    use = sort(text + after)
    assert pairs(use.no_meaning) == [(text.split()[0].partition("=")[0], values)]
    assert list(use.own_argv) == after.split()
    assert not use.refused and not use.unknown and not use.checked_arch


@pytest.mark.parametrize("text", ["--one", "--one --own 4", "--some", "--some --zero"])
def test_missing_value_is_an_error(text):
    with pytest.raises(ValueError, match=r"takes one.*got none; add it or remove the flag"):
        sort(text)


def test_value_of_a_switch_is_an_error():
    with pytest.raises(ValueError, match="--zero is a switch, got the value 'true'"):
        sort("--zero=true")


@pytest.mark.parametrize("text", ["--zero true", "--one a true", "--maybe a true", "--one=a true"])
def test_stray_value_is_unknown(text):
    use = sort(text + " --own 4")
    assert [(stray.token, stray.nearest) for stray in use.unknown] == [("true", ())]
    assert use.own_argv == ("--own", "4")


def test_own_flags_keep_order_values_and_repeats():
    text = "--own -3 --zero --own-list a b -c --one x --own=7 -h --own"
    use = sort(text)
    assert " ".join(use.own_argv) == "--own -3 --own-list a b -c --own=7 -h --own"
    assert pairs(use.no_meaning) == [("--zero", ()), ("--one", ("x",))]


def test_own_flag_wins_over_a_foreign_one():
    use = classify(["--bad", "5"], {"--bad"}, SMALL)
    assert use.own_argv == ("--bad", "5")
    assert not use.refused


def test_foreign_spellings_of_own_flags_are_renamed():
    assert sort("--own_list a_b c").own_argv == ("--own-list", "a_b", "c")
    assert sort("--own_list=a_b").own_argv == ("--own-list=a_b",)
    assert sort("--alias_of_honoured 3").own_argv == ("--honoured", "3")
    assert sort("--alias-of-honoured=3").own_argv == ("--honoured=3",)


def test_honoured_flag_that_is_not_an_own_one_is_unknown_and_not_suggested():
    use = classify(["--honoured", "3", "--honoure", "4"], {"--own"}, SMALL)
    assert [word.token for word in use.unknown] == ["--honoured", "--honoure"]
    assert not any("--honoured" in word.nearest for word in use.unknown)
    assert use.own_argv == ()


def test_every_honoured_name_is_an_own_flag_of_an_entry():
    own = {
        spelling
        for run_type in ENTRIES.values()
        for _, flags in own_flags(run_type)
        for flag in flags
        for spelling in flag.spellings
    }
    honoured = {f.name for f in foreign_flags().values() if f.disposition is Disposition.HONOURED}
    assert len(honoured) > 70
    assert honoured - own == set()


def test_every_checked_flag_has_exactly_one_counterpart_in_the_hf_config():
    kind = Disposition.CHECKED_ARCH
    checked = {flag.name for flag in foreign_flags().values() if flag.disposition is kind}
    assert set(COUNTERPART_OF) == checked


def test_underscores_equal_hyphens():
    use = classify(["--use_flash_attn", "--num_experts=8"], OWN)
    assert pairs(use.no_meaning) == [("--use-flash-attn", ())]
    assert pairs(use.checked_arch) == [("--num-experts", ("8",))]


def test_refused_flags_carry_values_and_the_fix():
    use = sort("--bad --worse a b")
    assert pairs(use.refused) == [("--bad", ()), ("--worse", ("a", "b"))]
    assert {flag.reason for flag in use.refused} == {"remove it"}


@pytest.mark.parametrize(("value", "refused"), [("good", False), ("fine", False), ("evil", True)])
def test_harmless_values_of_a_refused_flag_are_accepted(value, refused):
    use = sort(f"--choice {value}")
    assert bool(use.refused) is refused
    assert bool(use.no_meaning) is not refused


def test_unknown_flag_names_the_nearest_and_swallows_its_values():
    use = classify(["--num-expert", "8", "--grpo_group_sise", "4", "--xyzzy-plugh"], OWN)
    assert [unknown.token for unknown in use.unknown] == [
        "--num-expert",
        "--grpo_group_sise",
        "--xyzzy-plugh",
    ]
    assert use.unknown[0].nearest[0] == "--num-experts"
    assert use.unknown[1].nearest[0] == "--grpo-group-size"
    assert use.unknown[2].nearest == ()


def test_refused_flags_are_not_suggested():
    assert classify(["--fp161"], {"--bf16"}).unknown[0].nearest == ("--bf16",)


def test_prefixes_are_not_expanded():
    assert [unknown.token for unknown in sort("--hon 3").unknown] == ["--hon"]


def test_double_dash_and_short_options_are_unknown():
    assert [unknown.token for unknown in sort("-x --").unknown] == ["-x", "--"]


def test_nearest_is_bounded_with_the_closest_first():
    known = ["--save-interval", "--save", "--eval-interval", "--log-interval", "--lr"]
    assert nearest("--save_intervall", known, n=2) == ("--save-interval", "--eval-interval")
    assert len(nearest("--save-intervall", known)) == 3


SCRIPTS = {
    "qwen3-8b pretrain": data_flags.QWEN3_8B_PRETRAIN,
    "qwen3-32b tune": data_flags.QWEN3_32B_TUNE,
    "qwen3-235b pretrain": data_flags.QWEN3_235B_A22B_PRETRAIN,
    "deepseek3-671b pretrain": data_flags.DEEPSEEK3_671B_PRETRAIN,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_published_scripts_have_no_unknown_and_no_refused_flag(name):
    argv = SCRIPTS[name]
    rl = ["--perform-rl-step", "--grpo-group-size", "8", "--hf-checkpoint", "PATH"]
    use = classify([*argv, *rl], OWN)
    assert use.unknown == ()
    assert use.refused == ()
    assert list(use.own_argv[-len(rl) :]) == rl
    sorted_tokens = len(use.own_argv) + sum(
        1 + len(flag.values) for flag in (*use.no_meaning, *use.checked_arch)
    )
    assert sorted_tokens == len(argv) + len(rl)


def test_moe_script_has_its_architecture_checked():
    use = classify(data_flags.DEEPSEEK3_671B_PRETRAIN, OWN)
    checked = dict(pairs(use.checked_arch))
    assert checked["--num-experts"] == ("256",)
    assert checked["--kv-lora-rank"] == ("512",)
    assert checked["--qk-layernorm"] == ()
    assert checked["--multi-latent-attention"] == ()
    assert "--num-layers" in use.own_argv


def test_table_is_sound():
    flags = set(foreign_flags().values())
    assert len(flags) > 1100
    assert {flag.source for flag in flags} == {"Megatron-LM", "MindSpeed", "MindSpeed-LLM"}
    for spelling, flag in foreign_flags().items():
        assert spelling in flag.spellings
        assert flag.nargs in ARITIES
        assert "\n" not in flag.reason and len(flag.reason) < 100
        if flag.disposition is not Disposition.HONOURED:
            assert flag.reason, flag.name


def test_table_rejects_a_second_disposition_and_a_bad_row():
    group = Group(Disposition.NO_MEANING, "free", "--a:0")
    with pytest.raises(AssertionError, match="--a has two dispositions"):
        table(("x", (group,)), ("y", (group,)))
    with pytest.raises(AssertionError, match="has no arity"):
        table(("x", (Group(Disposition.NO_MEANING, "free", "--a"),)))
    with pytest.raises(AssertionError, match="has the arity '3'"):
        table(("x", (Group(Disposition.NO_MEANING, "free", "--a:3"),)))
    with pytest.raises(AssertionError, match="has no reason"):
        table(("x", (Group(Disposition.REFUSED, "", "--a:0"),)))
    with pytest.raises(AssertionError, match="accepted with any value"):
        ForeignFlag("--a", (), "1", "x", Disposition.NO_MEANING, "free", ("v",))


@pytest.mark.parametrize(
    ("flag", "disposition"),
    [
        ("--tensor-model-parallel-size", Disposition.HONOURED),
        ("--grpo-kl-beta", Disposition.HONOURED),
        ("--persistent-save-interval", Disposition.HONOURED),
        ("--q-lora-rank", Disposition.CHECKED_ARCH),
        ("--moe-router-topk", Disposition.CHECKED_ARCH),
        ("--swap-optimizer", Disposition.HONOURED),
        ("--eval-iters", Disposition.NO_MEANING),
        ("--fp16", Disposition.REFUSED),
        ("--reset-attention-mask", Disposition.NO_MEANING),
        ("--schedules-method", Disposition.NO_MEANING),
        ("--init-method-std", Disposition.NO_MEANING),
        ("--tokenizer-type", Disposition.NO_MEANING),
        ("--data-path", Disposition.NO_MEANING),
        ("--no-rl-inference-logprobs-is-correction", Disposition.NO_MEANING),
        ("--noop-layers", Disposition.HONOURED),
        ("--qk-layernorm", Disposition.CHECKED_ARCH),
        ("--rl-inference-logprobs-is-correction", Disposition.HONOURED),
        ("--rl-importance-sampling-truncation-coef", Disposition.HONOURED),
        ("--grpo-filter-groups-with-same-reward", Disposition.HONOURED),
        ("--rl-inference-pipeline-model-parallel-size", Disposition.REFUSED),
        ("--rampup-batch-size", Disposition.REFUSED),
        ("--retro-add-retriever", Disposition.REFUSED),
        ("--lora-r", Disposition.REFUSED),
        ("--nproc-per-node", Disposition.REFUSED),
    ],
)
def test_dispositions_that_must_not_drift(flag, disposition):
    assert foreign_flags()[flag].disposition is disposition


ACCEPTED = sorted(
    {flag for flag in foreign_flags().values() if flag.disposition is not Disposition.HONOURED},
    key=lambda flag: flag.name,
)
NUM_VALUES = {"0": (0, 0), "1": (1, 1), "?": (0, 1), "+": (1, 4), "*": (0, 4)}
VALUES = st.sampled_from(["1", "-1", "-0.5", "a,b", "PATH", "x y", "a=b", "_"])


@st.composite
def uses(draw):
    flag = draw(st.sampled_from(ACCEPTED))
    low, high = NUM_VALUES[flag.nargs]
    values = draw(st.lists(VALUES, min_size=low, max_size=high))
    return flag, draw(st.sampled_from(flag.spellings)), values


@given(st.lists(st.one_of(uses(), st.lists(VALUES, max_size=3)), max_size=12))
def test_every_token_is_sorted_once_and_in_order(parts):
    argv, own, foreign = [], [], []
    for part in parts:
        if isinstance(part, list):
            own += ["--hf-checkpoint", *part]
            argv += ["--hf-checkpoint", *part]
        else:
            flag, spelling, values = part
            argv += [spelling, *values]
            foreign.append((flag.name, tuple(values)))
    use = classify(argv, OWN)
    assert list(use.own_argv) == own
    assert use.unknown == ()
    found = pairs(use.no_meaning) + pairs(use.checked_arch) + pairs(use.refused)
    assert sorted(found) == sorted(foreign)
    for kind in (use.no_meaning, use.checked_arch, use.refused):
        names = pairs(kind)
        assert names == [item for item in foreign if item in names]


def test_a_pipeline_layout_is_refused_with_the_flag_to_use():
    """It was to decide which stage holds which layer; ignored, memory would not be as planned."""
    (found,) = classify(["--pipeline-model-parallel-layout", "Et*3|(tt|)*2L"], OWN).refused
    assert "--num-layer-list" in found.reason
