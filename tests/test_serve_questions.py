"""What the page answers in words, what a user brings along, and the nearest layout that fits; without a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

pytest.importorskip("dash")

from simpar.errors import InputError
from simpar.report.serve import downloads, my_runs, tables
from simpar.report.serve.answer import Answer, Answers
from simpar.report.serve.attached import MOST_PACKED, pack, unpack
from simpar.report.serve.fields import OWN_MODEL
from simpar.report.serve.nearest import nearest
from simpar.report.serve.questions import QUESTIONS, said
from simpar.report.serve.state import Bases, of_query
from simpar.specs.hardware import load_hardware
from simpar.specs.site import Site
from simpar.units import format_seconds

SMALL = "scenario=llama3.1-70b_h100x64_tp4cp2pp4"
FULL = SMALL + "&mbs=4"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def bases() -> Bases:
    return Bases()


@pytest.fixture(scope="module")
def answers(bases: Bases) -> Answers:
    return Answers(bases)


def answered(answers: Answers, query: str) -> Answer:
    found = answers(of_query(query, answers.bases))
    assert found is not None
    return found


def test_every_question_has_an_answer_with_the_numbers_of_the_step(answers: Answers) -> None:
    answer = answered(answers, SMALL)
    found = said(answer)
    assert {*found} == {*QUESTIONS} - {"mine"}
    assert found["fit"].verdict.startswith("Yes: ")
    assert "61.24 GiB of 79.11 GiB" in found["fit"].verdict
    assert f"{answer.result.tokens_per_s:,.0f} tokens per second" in found["fast"].verdict
    days = 1e12 / answer.result.tokens_per_s / 0.9 / 86400
    assert found["long"].verdict.startswith(f"1T tokens take {days:.0f} days and cost $")
    assert all(each.why for each in found.values())
    # The reasons name the largest loss that a layout can change first.
    assert "memory-bound" in found["why"].why[0]


def test_nothing_that_does_not_fit_has_a_price(answers: Answers) -> None:
    answer = answered(answers, FULL)
    found = said(answer)
    assert found["fit"].verdict.startswith("No: ")
    assert found["fit"].bad
    assert "96.41 GiB of activations" in found["fit"].why[1]
    assert "costs nothing" in found["long"].verdict
    assert answer.run is None
    shown = {name: number for name, _, number, _ in tables.headline(answer)}
    assert (shown["days"], shown["cost"]) == ("none", "none")


def test_the_nearest_layout_that_fits_changes_one_setting_where_one_is_enough(bases: Bases, answers: Answers) -> None:
    found = nearest(of_query(FULL, bases), bases)
    assert found is not None
    assert len(found.changes) == 1
    answer = answered(answers, found.state.query(bases))
    assert answer.result.fits
    assert answer.result.step_time_s == pytest.approx(found.step_time_s)


def test_where_nothing_near_fits_there_is_none(bases: Bases) -> None:
    assert nearest(of_query(SMALL + "&gpu_mem=1", bases), bases) is None


def test_a_dropped_model_is_simulated_and_travels_in_the_address(bases: Bases, answers: Answers) -> None:
    query = f"{SMALL}&{urlencode({'model': OWN_MODEL, 'config': pack(CONFIG)})}&v=1&schedule=auto"
    answer = answered(answers, query)
    assert answer.result.layout.scenario.model.num_hidden_layers == 16
    again = of_query(answer.query, bases)
    assert again == answer.state
    assert 'kind = "transformer"' in downloads.scenario_toml(answer, bases)


def test_figures_of_an_own_gpu_replace_those_of_the_profile(bases: Bases, answers: Answers) -> None:
    answer = answered(answers, SMALL + "&gpu_mem=141&gpu_flops=500&gpn=4&nodes=16")
    own, base = answer.scenario.hardware, load_hardware("dgx-h100")
    assert own.gpu.memory.value == 141e9
    assert own.gpus_per_node == 4
    # fp8 moves with bf16.
    assert own.peak_flops_per_s("bf16") == 500e12
    assert own.peak_flops_per_s("fp8") / base.peak_flops_per_s("fp8") == pytest.approx(500 / 989, rel=1e-4)
    # Kernels measured on another GPU do not outrun this one's peak.
    assert answer.result.mfu < 0.8
    text = downloads.scenario_toml(answer, bases)
    assert "simpar profiles new --from dgx-h100 --out own-gpu.toml --set 'gpu.memory=141 GB'" in text
    assert 'hardware = "own-gpu.toml"' in text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("&gpu_mem=-3", "must be a number above 0"),
        ("&model=" + quote(OWN_MODEL), "no file was dropped"),
        ("&model=" + quote(OWN_MODEL) + "&config=AAAA", "is not readable"),
        ("&site=" + pack({"compute": -1}), "site"),
        ("&site=" + quote("../../etc/passwd"), "is not readable"),
        ("&gpu_mem=80&hardware=/etc/passwd", "unknown hardware"),
        ("&config=" + "A" * (3 * MOST_PACKED), "longer than"),
    ],
)  # fmt: skip
def test_what_is_brought_along_and_wrong_is_said(bases: Bases, query: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        of_query(SMALL + query, bases).scenario(bases)


def test_a_small_text_that_unpacks_to_much_is_refused() -> None:
    with pytest.raises(InputError):
        unpack(pack({"a": "0" * 4_000_000}), "config")


def test_a_learned_site_moves_every_answer(answers: Answers) -> None:
    site = pack(Site(compute=1.2, residual=0.02).model_dump(mode="json", exclude_defaults=True))
    assert answered(answers, f"{SMALL}&site={site}").result.step_time_s > 1.1 * answered(answers, SMALL).result.step_time_s


def uploaded(text: str, encoding: str = "utf-8") -> str:
    import base64

    return "data:text/plain;base64," + base64.b64encode(text.encode(encoding)).decode()


def test_a_run_of_the_page_may_not_name_a_file_of_this_machine() -> None:
    for encoding in ("utf-8", "utf-16"):
        assert my_runs.text_of(uploaded("iteration 1", encoding)) == "iteration 1"
    with pytest.raises(InputError, match="not text"):
        my_runs.text_of("data:;base64,/////w==")
    with pytest.raises(InputError, match="leave `scenario` out"):
        my_runs.check_rows('{"step_time_s": 3.0}\n{"scenario": "/etc/passwd", "step_time_s": 3.0}')


def texts(parts: Any) -> str:
    return json.dumps(parts, default=lambda part: part.to_plotly_json())


def test_own_runs_show_measured_predicted_causes_and_factors(bases: Bases, answers: Answers) -> None:
    from simpar.api.sites import own_run

    rows: Sequence[dict[str, Any]] = [{"step_time_s": seconds} for seconds in (18.1, 18.2, 18.0)]
    table = of_query(SMALL, bases).table(bases)
    found = own_run("\n".join(json.dumps(row) for row in rows), table, name="monday")
    shown = texts(my_runs.shown(found.to_dict()))
    assert "18.1 s" in shown
    assert format_seconds(answered(answers, SMALL).result.step_time_s) in shown
    assert [f"{factor} takes x" in shown for factor in ("compute", "memory", "communication", "host")] == [True] * 4
    assert "Next check" in shown
    assert found.site.learned


def test_the_profile_of_an_own_gpu_is_written_once(tmp_path: Path, bases: Bases) -> None:
    from simpar.report.serve.attached import hardware_of

    values = {**of_query(SMALL, bases).values, "gpu_bw": 2000.0}
    first = hardware_of("dgx-h100", values, tmp_path)
    assert hardware_of("dgx-h100", values, tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [Path(first).name]
    assert load_hardware(first).gpu.memory_bandwidth.value == 2e12
    assert hardware_of("dgx-h100", {**values, "gpu_bw": None}, tmp_path) == "dgx-h100"
