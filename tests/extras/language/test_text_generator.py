"""Test text that a run generates: in predictions, in evaluations, by a hook, and on the command line."""

import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jengine
from jengine import Runner
from jengine.cli import main
from jengine.config.errors import ConfigError
from jengine.extras.language import Prompts, generate
from jengine.model import get_model
from jengine.train import compilation_counter

TEXT = "abc" * 48
PROMPTS = ["ab", "cabc", "a"]
ANSWERS = ["cab", "abc", "bca"]  # three tokens after each prompt
INNER = dict(
    type="LinenModel",
    module=dict(type="TransformerLM", vocab_size=257, width=16, depth=1, heads=2, mlp_width=32),
    inputs="tokens",
    loss=dict(type="CrossEntropy", label="targets"),
)


def share_first(text, reference):
    return text[0] == reference[0]


def make_config(work_dir, **changes):
    rows = dict(type="TokenWindows", tokens=list(TEXT.encode()), length=16)
    records = [dict(prompt=prompt, response=answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    config = dict(
        model=dict(type="TextGenerator", model=INNER, tokenizer="bytes", max_new_tokens=3),
        work_dir=str(work_dir),
        train_dataloader=dict(batch_size=4, dataset=rows),
        train_cfg=dict(by_epoch=False, max_iters=40, val_interval=40),
        val_dataloader=dict(
            loss=dict(batch_size=4, dataset=rows),
            text=dict(batch_size=2, dataset=dict(type="Prompts", source=records)),
        ),
        val_evaluator=dict(
            loss=dict(type="Perplexity", label="targets"),
            text=[dict(type="TextScore"), dict(type="TextScore", score=share_first)],
        ),
        val_cfg=dict(),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=1e-2)),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=20),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=40),
        ),
        randomness=dict(seed=0),
    )
    return {**config, **changes}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train until the text is learned, with samples every 15 iterations; return the run, and what compiled since 16."""
    hook = dict(type="GenerationHook", prompts=PROMPTS, interval=15)
    runner = Runner.from_cfg(make_config(tmp_path_factory.mktemp("text"), custom_hooks=[hook]))
    runner.train()
    return runner


def read_log(runner):
    return (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()


def test_an_evaluation_by_name_scores_generated_texts_beside_the_loss(trained):
    _, iteration, metrics = trained.validations[-1]
    assert iteration == 40
    assert metrics["text/exact_match"] == metrics["text/share_first"] == 1.0
    assert 1 < metrics["loss/perplexity"] < 1.5


def test_a_hook_logs_samples_at_its_interval_and_at_the_end_with_one_program(trained):
    lines = [line for line in read_log(trained).splitlines() if "Sample at iteration" in line]
    assert [int(line.split("iteration ")[1].split(":")[0]) for line in lines] == [15] * 3 + [30] * 3 + [40] * 3
    assert [line.split("iteration ")[1] for line in lines[-3:]] == [
        f"40: {prompt!r} -> {answer!r}" for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    compiled = compilation_counter.count
    trained.predict(Prompts(PROMPTS).arrays)  # again, as the hook does
    assert compilation_counter.count == compiled


def test_predictions_for_prompts_are_what_generate_returns(trained):
    dataset = Prompts(PROMPTS)
    tokens = trained.predict(dataset, batch_size=2)
    assert trained.model.decode(tokens) == ANSWERS
    module = get_model(trained.model).module
    settings = dict(lengths=dataset.arrays["prompt_length"], stop_token=256)
    np.testing.assert_array_equal(
        tokens, generate(module, trained.state.params, dataset.arrays["prompt"], 3, **settings)
    )


def test_a_loaded_model_and_a_mesh_draw_the_samples_of_the_run(trained, tmp_path):
    sampling = dict(type="TextGenerator", model=INNER, tokenizer="bytes", max_new_tokens=8, temperature=2.0, top_k=50)
    prompts = Prompts(["ab", "cabc", "a", "bc"]).arrays
    tokens = jengine.load_model(trained.work_dir, model=sampling)(prompts)
    assert len(set(map(tuple, tokens))) == 4
    parallel = dict(
        type="Pjit", devices=4, mesh=dict(data=2, tensor=2), rules=[("query.kernel", (None, None, "tensor"))]
    )
    changes = dict(model=sampling, load_from=str(trained.work_dir), parallel=parallel)
    meshed = Runner.from_cfg(make_config(tmp_path, **changes))
    np.testing.assert_array_equal(meshed.predict(prompts), tokens)
    kernel = meshed.state.params["layers"]["attn"]["query"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, None, "tensor")
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(meshed.predict(prompts, seed=1), tokens)


def test_tokens_are_generated_in_the_dtype_of_the_run(trained, tmp_path):
    model = jengine.load_model(trained.work_dir, model=dict(type="TextGenerator", model=INNER, tokenizer="bytes"))
    generator, params = model.model, trained.state.params
    batch = Prompts(PROMPTS).arrays

    def count_bfloat16(predict):
        return str(jax.make_jaxpr(lambda params: predict(params, {}, batch))(params)).count("bf16")

    assert count_bfloat16(generator.predict) == 0
    cast = jengine.model.CastModel(generator, jengine.model.Precision(compute="bfloat16"))
    assert count_bfloat16(cast.predict) > 50


def test_a_run_of_the_nnx_module_has_the_losses_and_the_checkpoint_of_the_linen_one(trained, tmp_path):
    inner = {**INNER, "type": "NnxModel", "module": {**INNER["module"], "type": "NnxTransformerLM"}}
    model = dict(type="TextGenerator", model=inner, tokenizer="bytes", max_new_tokens=3)
    runner = Runner.from_cfg(make_config(tmp_path, model=model, load_from=str(trained.work_dir)))
    assert runner.val()["loss/perplexity"] == pytest.approx(trained.validations[-1][2]["loss/perplexity"], rel=1e-6)
    assert runner.model.decode(runner.predict(Prompts(PROMPTS).arrays)) == ANSWERS


@pytest.mark.parametrize("ending", ["jsonl", "txt", "csv"])
def test_the_command_line_continues_the_prompts_of_a_file(trained, tmp_path, capsys, ending):
    lines = {
        "jsonl": [json.dumps(dict(prompt=prompt)) for prompt in PROMPTS], "txt": PROMPTS, "csv": ["prompt", *PROMPTS],
    }[ending]  # fmt: skip
    (tmp_path / f"prompts.{ending}").write_text("\n".join(lines))
    assert (
        main(
            [
                "predict",
                str(pathlib.Path(trained.work_dir) / "config.py"),
                trained.work_dir,
                "--work-dir",
                str(tmp_path / "work"),
                "--data",
                str(tmp_path / f"prompts.{ending}"),
                "--out",
                str(tmp_path / "texts.jsonl"),
            ]
        )
        == 0
    )
    assert f"3 texts of {trained.work_dir}/iter_40, written to" in capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert found == [dict(prompt=prompt, text=text) for prompt, text in zip(PROMPTS, ANSWERS, strict=True)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 200_000, "must be JSON, got in line 1: JSON must be nested at most 100 levels deep"),
        ('"a"\n5', "must be an object or a string, got in line 2: 5"),
        ('{"messages": 5}', "`messages` of a record must be a list of objects with a `role`, got in line 1"),
        ('{"messages": [{"content": "a"}]}', "`messages` of a record must be a list of objects with a `role`"),
        ('{"text": 5}', "`text` of a record must be a string, got in line 1"),
        (
            "\n".join(['"a"'] * 40_000 + [f'"{"b" * 40_000}"']),
            "at most 1,073,741,824 tokens when padded to the longest",
        ),
    ],
)
def test_prompts_from_anyone_are_refused_in_one_sentence(tmp_path, content, message):
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Prompts(str(tmp_path / "prompts.jsonl"))
    assert len(str(caught.value)) < 400
