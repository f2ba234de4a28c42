"""The package `lm_eval`, with questions of our own."""

import json
import pathlib
import tempfile

from .checks import ANSWER, DEMO, WHO


def checks(c):
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "q.jsonl").write_text("".join(json.dumps({"q": q, "a": ANSWER}) + "\n" for q in [WHO] * 3))
        base = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/q.jsonl\n"
            "test_split: test\ndoc_to_text: '{{q}}'\n"
        )
        (folder / "say.yaml").write_text(
            f"task: q4_say\noutput_type: generate_until\n{base}doc_to_target: '{{{{a}}}}'\n"
            "generation_kwargs:\n  until: ['\\n']\n  max_gen_toks: 40\n  temperature: 0\n"
            "metric_list:\n  - metric: exact_match\n"
        )
        (folder / "choose.yaml").write_text(
            f"task: q4_choose\noutput_type: multiple_choice\n{base}doc_to_target: 0\n"
            "doc_to_choice: [' I am', ' zzz']\nmetric_list:\n  - metric: acc\n"
        )
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        run = lambda model, more, task, **options: lm_eval.simple_evaluate(
            model=model, model_args=f"model=demo,base_url={c.url}/v1/{more},num_concurrent=2,max_retries=1",
            tasks=[task], task_manager=manager, bootstrap_iters=0, **options)["results"][task]
        with c.part("local-chat-completions"):
            result = run(
                "local-chat-completions", "chat/completions,tokenizer_backend=None", "q4_say",
                apply_chat_template=True,
            )
            c.same("chat score", result["exact_match,none"], 1.0)
        with c.part("local-completions"):
            result = run("local-completions", "completions,tokenizer_backend=None", "q4_say")
            c.same("completions", "exact_match,none" in result)
        with c.part("log-likelihoods"):
            result = run(
                "local-completions", f"completions,tokenizer_backend=huggingface,tokenizer={DEMO}",
                "q4_choose",
            )
            c.same("log-likelihoods", 0 <= result["acc,none"] <= 1)
