"""Stand-ins for vLLM: one draws completions, one loads weights, and one writes with what it has loaded."""

import math
from types import SimpleNamespace

import torch
from safetensors import safe_open
from tiny_models import VOCAB
from trl.generation.vllm_generation import VLLMGeneration

_END = 2


class EngineStandIn:
    """In the place of TRL's `VLLMGeneration`: completions of one to `max_completion_length` tokens.

    They are the same in each training. One in ten log-probabilities is missing, as vLLM may have it.
    """

    def __init__(self, max_completion_length, **options):
        self.longest = max_completion_length
        self.drawn = torch.Generator().manual_seed(17)
        self.synced = 0

    def sync_weights(self):
        self.synced += 1

    def _int(self, low, high):
        return int(torch.randint(low, high, (), generator=self.drawn))

    def completion(self):
        """Token ids, and the log-probability of each, or None."""
        length = self._int(1, self.longest + 1)
        ids = [self._int(3, VOCAB) for _ in range(length)]
        if self._int(0, 2):
            ids[-1] = _END
        scores = torch.randn(length, generator=self.drawn) * 0.5 - math.log(VOCAB)
        return ids, [None if self._int(0, 10) == 0 else score for score in scores.tolist()]

    def generate(self, prompts, images, num_generations, profiler=None):
        made = [self.completion() for _ in prompts]
        ids = [ids for ids, _ in made]
        scores = [[[score] for score in scores] for _, scores in made]
        return prompts, ids, scores, None


def install(monkeypatch):
    """Have the trainers of GRPO and RLOO that are built from now on generate by the stand-in."""
    for name in ("grpo", "rloo"):
        monkeypatch.setattr(f"trl.trainer.{name}_trainer.VLLMGeneration", EngineStandIn)


class Loads:
    """Takes weights under the names and in the shapes of a checkpoint, each once, as vLLM's models load theirs."""

    def __init__(self, shapes):
        self.shapes = shapes
        self.loaded = {}

    def load_weights(self, pairs):
        for name, weight in pairs:
            assert name in self.shapes, f"the checkpoint has no {name}"
            assert self.shapes[name] == list(weight.shape), name
            assert name not in self.loaded, f"{name} came twice"
            self.loaded[name] = weight.detach().clone()

    def update_named_params(self, metadata, named_params):
        """Of a server: what comes is what was announced, in this order."""
        for (name, dtype, shape), (sent, weight) in zip(metadata, named_params, strict=True):
            assert (sent, str(weight.dtype), list(weight.shape)) == (name, f"torch.{dtype}", shape)
            self.load_weights([(sent, weight)])

    def reset_prefix_cache(self):
        assert self.loaded

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}


class Engine(EngineStandIn, VLLMGeneration):
    """TRL's own, with a stand-in for vLLM. Weights go through all of TRL's code."""

    shapes: dict = {}

    def __init__(self, **options):
        VLLMGeneration.__init__(self, **options)
        EngineStandIn.__init__(self, **options)

    def _init_vllm(self):
        self.loads = self.vllm_client = Loads(self.shapes)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self.loads))
        executor = SimpleNamespace(driver_worker=runner)
        engine = SimpleNamespace(model_executor=executor)
        self.llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=self.loads.reset_prefix_cache)

    def sync_weights(self):
        self.loads.loaded = {}
        VLLMGeneration.sync_weights(self)


class WritingEngine(Engine):
    """Writes with the weights that it has loaded, into a model of its own. Prompts have one length.

    Its log-probabilities are a little off, as in an engine with kernels that round otherwise.
    """

    model_of = None  # a function that makes the model

    def __init__(self, **options):
        super().__init__(**options)
        self.own = type(self).model_of().eval()

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        self.own.load_state_dict(self.loads.loaded)
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        whole = self.own.generate(
            ids, attention_mask=mask, max_new_tokens=self.longest, do_sample=True, top_k=0, pad_token_id=0
        )
        scores = self.own(whole).logits[:, ids.shape[1] - 1 : -1].log_softmax(-1)
        written = whole[:, ids.shape[1] :]
        chosen = scores.gather(-1, written[..., None]) + 0.01 * torch.randn(*written.shape, 1)
        lengths = [(row == _END).nonzero()[0].item() + 1 if (row == _END).any() else len(row) for row in written]
        texts = [row[:length].tolist() for row, length in zip(written, lengths, strict=True)]
        return prompts, texts, [row[:length].tolist() for row, length in zip(chosen, lengths, strict=True)], None


def shapes_of(model, folder):
    """The names and shapes of the weights in a checkpoint of `model`, which is written into `folder`."""
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
