"""`kvtier calibrate` on a small model with random weights: what is measured is what the codec does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from kvtier.appliance.calibrate.budget import parse_budget  # noqa: E402
from kvtier.appliance.calibrate.coding import EXACT, Coders, Coding, Kind, Unit, Words, menu  # noqa: E402
from kvtier.appliance.calibrate.search import CodedModel, NotKept, check, profile_of, search, through_codec  # noqa: E402
from kvtier.appliance.calibrate.sensitivity import units_of  # noqa: E402
from kvtier.appliance.calibrate.subject import Subject, Unsuited  # noqa: E402
from kvtier.appliance.cli.app import cli  # noqa: E402
from kvtier.tiers.codecs.lossy.profile_file import read_profile  # noqa: E402

BLOCK_TOKENS = 16
PREFIX_TOKENS = 48
ROW_TOKENS = 64
SMALL = ["--rows", "2", "--prefix", "48", "--asked", "16", "--block-tokens", "16"]


def llama(**changed: Any) -> Any:
    """A model whose attention is sharp enough to notice what it attends to."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        | changed
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(4)
    return model.to(torch.bfloat16)


def rows(num_rows: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(256, (num_rows, ROW_TOKENS), generator=generator)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(), rows(3), PREFIX_TOKENS, "bfloat16", rows_per_pass=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a text beside it."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    llama().save_pretrained(path)
    (path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}; " for i in range(60)))
    return path


def calibrate(folder: Path, out: Path, *options: str, budget: str = "kl 0.02") -> Result:
    command = ["calibrate", str(folder), "--budget", budget, "--data", str(folder / "text.txt")]
    return CliRunner().invoke(cli, [*command, "--out", str(out), *SMALL, *options])


# ------------------------------------------------------------------------------------------ the subject


def test_the_exact_past_changes_nothing_and_answers_are_those_of_one_pass(subject: Subject) -> None:
    quality = subject.quality_of(subject.past)
    assert (quality.kl, quality.flips, quality.attention_error) == (0, 0, 0)
    model = llama().float()
    with torch.inference_mode():
        whole = model(input_ids=rows(3)).logits[:, PREFIX_TOKENS:-1].log_softmax(-1)
    nll = -whole.gather(-1, rows(3)[:, PREFIX_TOKENS + 1 :, None]).mean().item()
    assert quality.exact_nll == pytest.approx(nll, abs=0.02)  # its past was rounded to bfloat16


def test_fewer_bits_cost_more_and_the_page_of_units_is_whole(subject: Subject) -> None:
    coders = Coders(subject.past, subject.dtype)
    for unit in units_of(subject, "int"):
        losses = []
        for bits in (2, 4, 8):
            words, _ = coders.coded(unit, Coding("int", bits, "token"), BLOCK_TOKENS)
            losses.append(subject.loss_of({unit: words}))
        assert losses[0] > losses[1] > losses[2] > 0
    assert len(units_of(subject, "int")) == 2 * 2 * 2
    assert units_of(subject, "transform") == [
        Unit(layer, plane, 0, 2) for layer in (0, 1) for plane in (0, 1)
    ]


def test_only_the_unit_that_is_named_is_replaced(subject: Subject) -> None:
    unit = Unit(1, 1, 1)
    words = subject.past[1, 1, :, :, 1:2].copy()
    assert subject.loss_of({unit: words}) == 0
    assert subject.loss_of({unit._replace(first_head=0): words}) > 0


@pytest.mark.parametrize("kind", ["int", "transform"])
def test_units_are_coded_as_the_codec_codes_fragments(subject: Subject, kind: Kind) -> None:
    """Every coding somewhere, and the whole past through both ways: the same bits come back."""
    coders = Coders(subject.past, subject.dtype)
    model = CodedModel(bytes(32), subject.dtype, BLOCK_TOKENS, coders)
    codings = [*menu(kind), EXACT]
    chosen = {unit: codings[i % len(codings)] for i, unit in enumerate(units_of(subject, kind))}
    expected = subject.past.copy()
    for unit, coding in chosen.items():
        words, _ = coders.coded(unit, coding, BLOCK_TOKENS)
        expected[unit.layer, unit.plane, :, :, unit.heads] = words
    read, bits = through_codec(profile_of(model, subject.past, chosen), subject.past, BLOCK_TOKENS)
    assert np.array_equal(read, expected)
    assert not np.array_equal(read, subject.past)
    assert 2 < bits < 16


def test_values_no_coder_takes_are_stored_as_they_are() -> None:
    past: Words = np.full((1, 2, 1, BLOCK_TOKENS, 1, 32), 0x3F80, np.uint16)
    past[0, 0, 0, 3, 0, 5] = 0x7F80  # an infinity
    words, bits = Coders(past, "bfloat16").coded(Unit(0, 0, 0), Coding("int", 2, "token"), BLOCK_TOKENS)
    assert bits == 16
    assert np.array_equal(words[:, :, 0], past[0, 0, :, :, 0])


def test_models_that_keep_something_else_are_refused() -> None:
    config = transformers.MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, sliding_window=8,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config)
    with pytest.raises(Unsuited, match="not sliding windows"):
        Subject(model, rows(2), PREFIX_TOKENS, "bfloat16")
    with pytest.raises(Unsuited, match="say --dtype"):
        Subject(llama(), rows(2), PREFIX_TOKENS, "float32")


# ------------------------------------------------------------------------------------------- the search


def test_the_search_keeps_its_budget_or_says_how_near_it_came(subject: Subject) -> None:
    coders = Coders(subject.past, subject.dtype)
    model = CodedModel(bytes(32), subject.dtype, BLOCK_TOKENS, coders)
    from kvtier.appliance.calibrate.allocation import CoderChoice

    def choices(understated: float) -> Any:
        """Losses that are `understated` times too small: the check has to notice."""
        found = {}
        for unit in units_of(subject, "int"):
            found[unit] = [CoderChoice(EXACT, 16.0, 0.0)]
            for bits in (2, 3, 4, 6, 8):
                coding = Coding("int", bits, "token")
                words, size = coders.coded(unit, coding, BLOCK_TOKENS)
                found[unit].append(CoderChoice(coding, size, subject.loss_of({unit: words}) / understated))
        return found

    budget = parse_budget("kl 0.01")
    honest = search(model, subject, choices(1), budget)
    assert honest.quality.kl <= 0.01
    wrong = search(model, subject, choices(50), budget)
    assert wrong.quality.kl <= 0.01
    assert wrong.stored_bits <= 1.25 * honest.stored_bits
    only_two_bits = {
        unit: [one for one in found if one.coding.bits == 2] for unit, found in choices(1).items()
    }
    with pytest.raises(NotKept, match="allow more"):
        search(model, subject, only_two_bits, parse_budget("kl 0.00001"))
    sized = search(model, subject, choices(1), parse_budget("ratio 3.2"))
    assert 16 / sized.stored_bits >= 3.15
    even = check(model, subject, {unit: found[2] for unit, found in choices(1).items()})
    assert sized.stored_bits <= even.stored_bits + 1.1


# --------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("kind", ["int", "transform"])
def test_a_profile_and_a_page_are_written_and_again_the_same(folder: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "first.yaml"
    result = calibrate(folder, out, "--coder", kind, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    profile = read_profile(out)
    assert told["digest"] == profile.digest.hex()
    assert profile.calibration["kl"] == told["kl"] <= 0.02
    assert {rule.coder for rule in profile.rules} <= {kind, "exact"}
    page = out.with_suffix(".html").read_text()
    assert page.count("<svg") == 2
    assert profile.digest.hex() in page
    assert calibrate(folder, tmp_path / "second.yaml", "--coder", kind).exit_code == 0
    assert read_profile(tmp_path / "second.yaml").digest == profile.digest


def test_a_stopped_run_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = tmp_path / "whole.yaml", tmp_path / "stopped.yaml"
    assert calibrate(folder, whole).exit_code == 0
    asked: list[Unit] = []
    loss_of = Subject.loss_of

    def counted(self: Subject, changed: Mapping[Unit, Words]) -> float:
        if len(asked) == 20:
            raise KeyboardInterrupt
        asked.extend(changed)
        return loss_of(self, changed)

    monkeypatch.setattr(Subject, "loss_of", counted)
    assert calibrate(folder, stopped).exit_code != 0
    monkeypatch.setattr(Subject, "loss_of", loss_of)
    measured = stopped.with_suffix(".measured").read_text()
    assert measured.count("\n") == 1 + 2 * 20 + 1
    assert calibrate(folder, stopped).exit_code == 0
    assert stopped.with_suffix(".measured").read_text().startswith(measured)
    assert read_profile(stopped).digest == read_profile(whole).digest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rows", "50"], "give a longer text, or fewer --rows"),
        (["--prefix", "40"], "not whole blocks of 16"),
        (["--dtype", "float32"], "say --dtype bfloat16"),
        (["--out", "profile.json"], "NAME.yaml"),
        (["--budget", "a little"], "write 'ppl"),
        (["--model-digest", "xyz"], "hexadecimal"),
    ],
)
def test_wrong_input_is_told_the_fix(folder: Path, tmp_path: Path, options: list[str], says: str) -> None:
    result = calibrate(folder, tmp_path / "profile.yaml", *options)
    assert result.exit_code in (1, 2)
    assert says in " ".join(result.stderr.split())
    assert not (tmp_path / "profile.yaml").exists()


def test_a_model_that_is_not_there_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    command = ["calibrate", str(tmp_path), "--budget", "kl 0.1", "--data", str(folder / "text.txt")]
    result = CliRunner().invoke(cli, [*command, "--out", str(tmp_path / "profile.yaml")])
    assert result.exit_code == 1
    assert "cannot be loaded" in result.stderr
