"""The disposition of foreign flags: existing pretraining scripts keep working."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.command_line.arguments import own_flags
from mindspeed_rl.compat.classify import classify
from mindspeed_rl.compat.foreign_flags import Disposition, foreign_flags, read_flags
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig

OWN = frozenset(
    spelling for _, flags in own_flags(RLRunConfig) for flag in flags for spelling in flag.spellings
) | {"-h", "--help"}

SMALL = read_flags(
    """
    compared = [["arch", "thing", "key", ""]]
    without = [["it saves memory", "saving:0 level=off"]]
    [accepted]
    "free" = "zero:0 one maybe:? some:+ any:*"
    [refused]
    "remove it" = "bad:0 worse:+ choice=good,fine"
    """
)


def sort(text: str):
    return classify(text.split(), {"--own", "--own-list", "-h"}, SMALL)


def classified(*argv: str):
    """Among all flags of the RL entry."""
    return classify(argv, OWN, foreign_flags())


def pairs(used):
    return [(flag.flag, flag.values) for flag in used]


@pytest.mark.parametrize("text", ["--one", "--one --own 4", "--some", "--some --zero"])
def test_missing_value_is_an_error(text):
    (line,) = sort(text).malformed
    assert line.startswith(f"{text.split()[0]} takes one ")


def test_value_of_a_switch_is_an_error():
    use = sort("--zero=true --zero=false --own 4")
    assert [line.split()[0] for line in use.malformed] == ["--zero", "--zero"]
    assert use.own == [("--own", ["4"])]


@pytest.mark.parametrize("text", ["--zero true", "--one a true", "--maybe a true", "--one=a true"])
def test_stray_value_is_unknown(text):
    use = sort(text + " --own 4")
    assert [(stray.token, stray.nearest) for stray in use.unknown] == [("true", [])]
    assert use.own == [("--own", ["4"])]


def test_own_flags_keep_order_values_and_repeats():
    text = "--own -3 --zero --own-list a b -c --one x --own=7 -h --own"
    use = sort(text)
    assert use.own == [
        ("--own", ["-3"]), ("--own-list", ["a", "b", "-c"]), ("--own", ["7"]), ("-h", []),
        ("--own", []),
    ]  # fmt: skip
    assert pairs(use.accepted) == [("--zero", ()), ("--one", ("x",))]


def test_own_flags_win_over_foreign_ones_and_are_renamed():
    use = classify(["--bad", "5"], {"--bad"}, SMALL)
    assert use.own == [("--bad", ["5"])] and not use.refused
    assert sort("--own_list a_b c").own == [("--own-list", ["a_b", "c"])]
    assert sort("--own_list=a_b c").own == [("--own-list", ["a_b", "c"])]


def test_underscores_equal_hyphens():
    use = classified("--use_flash_attn", "--num_experts=8")
    assert pairs(use.accepted) == [("--use-flash-attn", ())]
    assert pairs(use.compared) == [("--num-experts", ("8",))]


def test_refused_flags_carry_values_and_the_fix():
    use = sort("--bad --worse a b")
    assert pairs(use.refused) == [("--bad", ()), ("--worse", ("a", "b"))]
    assert {flag.reason for flag in use.refused} == {"remove it"}


def test_the_run_goes_on_without_what_only_saves():
    use = sort("--saving --level one --level off")
    assert pairs(use.without) == [("--saving", ()), ("--level", ("one",))]
    assert {flag.reason for flag in use.without} == {"it saves memory"}
    assert pairs(use.accepted) == [("--level", ("off",))]


@pytest.mark.parametrize(("value", "refused"), [("good", False), ("fine", False), ("evil", True)])
def test_harmless_values_of_a_refused_flag_are_accepted(value, refused):
    use = sort(f"--choice {value}")
    assert bool(use.refused) is refused
    assert bool(use.accepted) is not refused


def test_unknown_flag_names_the_nearest_and_swallows_its_values():
    use = classified("--num-expert", "8", "--grpo_group_sise", "4", "--xyzzy-plugh")
    assert [(unknown.token, unknown.nearest[:1]) for unknown in use.unknown] == [
        ("--num-expert", ["--num-experts"]),
        ("--grpo_group_sise", ["--grpo-group-size"]),
        ("--xyzzy-plugh", []),
    ]


def test_refused_flags_are_not_suggested():
    use = classify(["--fp161"], {"--bf16"}, foreign_flags())
    assert use.unknown[0].nearest == ["--bf16"]


@pytest.mark.parametrize("text", ["--own-li", "-x --"])
def test_prefixes_short_options_and_a_double_dash_are_unknown(text):
    assert [unknown.token for unknown in sort(text).unknown] == text.split()


def test_the_file_is_read_whole():
    flags = set(foreign_flags().values())
    assert len(flags) > 1000
    for spelling, flag in foreign_flags().items():
        assert spelling in flag.spellings and spelling.startswith("--") and "_" not in spelling
        assert flag.reason and flag.nargs in "01?+*"
        if flag.harmless_values:
            assert flag.disposition in (Disposition.REFUSED, Disposition.WITHOUT)
        assert (flag.comparison is None) is (flag.disposition is not Disposition.COMPARED)


def test_the_flags_that_refusals_name_are_flags_of_an_entry():
    entries = (RLRunConfig, PretrainRunConfig)
    own = {s for e in entries for _, flags in own_flags(e) for f in flags for s in f.spellings}
    told = {flag.reason for flag in foreign_flags().values() if flag.reason.startswith("it is --")}
    named = {word.rstrip(",;") for reason in told for word in reason.split() if word[:2] == "--"}
    assert "--grpo-group-size" in named and named <= own


def test_a_flag_with_two_dispositions_is_refused():
    with pytest.raises(ValueError, match="--a has two dispositions"):
        read_flags('[accepted]\n"free" = "a"\n[refused]\n"bad" = "a"')


@pytest.mark.parametrize(
    ("disposition", "flags"),
    [
        (Disposition.COMPARED, "--q-lora-rank --moe-router-topk --qk-layernorm"),
        (
            Disposition.ACCEPTED,
            "--eval-iters --reset-attention-mask --init-method-std "
            "--tokenizer-type --data-path --no-rl-inference-logprobs-is-correction",
        ),
        (
            Disposition.WITHOUT,
            "--reuse-fp32-param --swap-attention --recompute-norm --use-ascend-coc "
            "--schedules-method",
        ),
        (
            Disposition.REFUSED,
            "--fp16 --rl-inference-pipeline-model-parallel-size --rampup-batch-size "
            "--retro-add-retriever --qlora --nproc-per-node --pipeline-model-parallel-layout",
        ),
    ],
)
def test_dispositions_that_must_not_drift(disposition, flags):
    assert {foreign_flags()[flag].disposition for flag in flags.split()} == {disposition}


# without the four that are our own in this entry: an own flag wins
KNOWN = sorted(
    {flag for flag in foreign_flags().values() if OWN.isdisjoint(flag.spellings)},
    key=lambda flag: flag.name,
)
NUM_VALUES = {"0": (0, 0), "1": (1, 1), "?": (0, 1), "+": (1, 4), "*": (0, 4)}
VALUES = st.sampled_from(["1", "-1", "-1.5e-3", "a,b", "PATH", "x y", "a=b", "_"])


@st.composite
def uses(draw):
    flag = draw(st.sampled_from(KNOWN))
    low, high = NUM_VALUES[flag.nargs]
    values = draw(st.lists(VALUES, min_size=low, max_size=high))
    spelling = draw(st.sampled_from(flag.spellings))
    if values and flag.nargs in "1?" and draw(st.booleans()):
        return flag, [f"{spelling}={values[0]}"], values
    return flag, [spelling, *values], values


@given(st.lists(st.one_of(uses(), st.lists(VALUES, max_size=3)), max_size=12))
def test_every_token_is_sorted_once_and_in_order(parts):
    argv, own, foreign = [], [], []
    for part in parts:
        if isinstance(part, list):
            own.append(("--hf-checkpoint", part))
            argv += ["--hf-checkpoint", *part]
        else:
            flag, typed, values = part
            argv += typed
            foreign.append((flag.name, tuple(values)))
    use = classified(*argv)
    assert use.own == own
    assert use.unknown == []
    found = [
        pair
        for kind in (use.accepted, use.compared, use.without, use.refused)
        for pair in pairs(kind)
    ]
    assert sorted(found) == sorted(foreign)
    for kind in (use.accepted, use.compared, use.without, use.refused):
        names = pairs(kind)
        assert names == [item for item in foreign if item in names]
