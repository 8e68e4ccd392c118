"""Train the small Llama checkpoint that the demos run on.

    python examples/train_demo_model.py --text BOOKS.txt --out DIR --minutes 30

Output: a LlamaForCausalLM of 3.4 million parameters (hidden 256, 4 layers, 8 heads over 4 KV heads, tied embeddings)
and a byte-level BPE tokenizer of 2,048 entries, in the Hugging Face layout: `config.json`, `model.safetensors`
(bfloat16, about 7 MB) and `tokenizer.json`. Any loader of Llama checkpoints reads them.

Input: one plain-text file of English books. If the file has `*** START OF ...` and `*** END OF ...` lines, only the
text between them is used, and `--titles` selects books by words of their start line. The program drops headings,
footnotes and front matter, and joins the lines of each paragraph. `--clean-text FILE` also writes the resulting text.

Time: `--minutes`, plus about half a minute to prepare the text and to measure the result. Half an hour on two CPU cores
is enough for readable English. The first part of the run trains on windows of 512 tokens, the last on windows of 2,048,
so that the model stays readable far into a prompt. The seed determines the initial weights and the order of the
windows. The schedule follows the clock, so a faster machine takes more steps. `--start` trains an earlier checkpoint
further: use the same text and titles, and a smaller `--peak-lr`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional

BOS, EOS, BOS_ID, EOS_ID = "<s>", "</s>", 0, 1
HEADING = re.compile(r"(?m)^(?:CHAPTER .*|BOOK [A-Z]+:.*|[A-Z]+ EPILOGUE.*|(?:ADVENTURE +)?[IVXL]+\.(?: +[A-Z' -]+)?)$")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model, with the names of a Llama `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class Phase(NamedTuple):
    """One part of the run, until the share `until` of the time: a step trains on `batch` windows of `window` tokens."""

    until: float
    window: int
    batch: int


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained."""

    phases: tuple[Phase, ...] = (Phase(0.15, 512, 1), Phase(0.58, 512, 2), Phase(1.0, 2048, 1))
    peak_lr: float = 1.5e-3
    final_lr: float = 3e-5
    warmup: float = 0.02
    weight_decay: float = 0.05
    clip: float = 1.0


def read_chapters(text: str, titles: Sequence[str]) -> list[str]:
    """Return the chapters of the books in `text` as unwrapped paragraphs with a blank line between them."""
    text = text.replace("\r\n", "\n")
    books = re.findall(r"(?ms)^\*\*\* ?START OF (.*?)$(.*?)^\*\*\* ?END OF ", text) or [("", text)]
    if titles:
        books = [book for book in books if any(title.lower() in book[0].lower() for title in titles)]
    chunks = [chunk for _, body in books for chunk in HEADING.split(body)]
    chapters = ["\n\n".join(filter(None, map(unwrap, re.split(r"\n\s*\n", chunk)))) for chunk in chunks]
    # A shorter text is not a chapter but a title page, a table of contents or a number.
    return [chapter for chapter in chapters if len(chapter) >= 1500]


def unwrap(paragraph: str) -> str:
    """Join the lines of a paragraph and drop its marks. Return the empty string for a footnote."""
    line = " ".join(paragraph.split())
    return "" if line.startswith("*") else re.sub(r"\*(?:\[\d+\])?|_", "", line)


def train_tokenizer(chapters: Sequence[str], size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer that puts BOS before every text it encodes with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks, letters = [BOS, EOS], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=marks, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(chapters, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary embedding, the two halves of a head sharing their frequencies."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), torch.cat((inverse, inverse)))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the last dimension in the "rotate half" convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention in which two query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, wide, narrow = config.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, wide, bias=False)
        self.k_proj, self.v_proj = nn.Linear(hidden, narrow, bias=False), nn.Linear(hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = rotate(self.q_proj(x).view(rows, length, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.o_proj(y.transpose(1, 2).reshape(rows, length, -1)))


class MLP(nn.Module):
    """The SwiGLU feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """The embedding, the layers and the last norm, under the names they have in a Llama checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Llama(nn.Module):
    """The language model; its state dict carries the tensor names of a Llama checkpoint with tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.cos, self.sin = rope_tables(config.max_position_embeddings, config.head_dim, config.rope_theta)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What writes into the residual stream starts smaller, so that depth does not blow the stream up.
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.05 / math.sqrt(2 * config.num_hidden_layers) if residual else 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy of each window's tokens after the first."""
        return functional.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def sample(stream: Tensor, phase: Phase, generator: torch.Generator) -> Tensor:
    """Cut random windows out of the token stream; about half of them start with BOS, as prompts often do."""
    starts = torch.randint(len(stream) - phase.window, (phase.batch,), generator=generator)
    windows = stream[starts[:, None] + torch.arange(phase.window + 1)]
    windows[torch.rand(phase.batch, generator=generator) < 0.5, 0] = BOS_ID
    return windows


def learning_rate(done: float, config: TrainConfig) -> float:
    """Return the rate after the share `done` of the time: a linear warm-up, then a cosine."""
    if done < config.warmup:
        return config.peak_lr * (done + 1e-3) / (config.warmup + 1e-3)
    cosine = (1 + math.cos(math.pi * (done - config.warmup) / (1 - config.warmup))) / 2
    return config.final_lr + (config.peak_lr - config.final_lr) * cosine


def train(model: Llama, stream: Tensor, config: TrainConfig, minutes: float, seed: int) -> None:
    """Train `model` on `stream` until the minutes are over."""
    matrices, gains = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(seed)
    step, tokens, average, report, begin = 0, 0, 0.0, 0.0, time.monotonic()
    while (elapsed := time.monotonic() - begin) < minutes * 60:
        done = elapsed / (minutes * 60)
        phase = next(phase for phase in config.phases if done < phase.until)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, config)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # twice as many tokens in the same time
            loss = model.loss(sample(stream, phase, generator))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        step, tokens = step + 1, tokens + phase.batch * phase.window
        average = loss.item() if step == 1 else 0.97 * average + 0.03 * loss.item()
        if elapsed >= report:
            report += 15
            print(f"{elapsed:5.0f} s  step {step:5d}  window {phase.window:4d}  loss {average:.3f}", flush=True)
    print(f"trained on {tokens:,} tokens in {step:,} steps, loss {average:.3f}", flush=True)


def save(out: Path, model: Llama, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Write the checkpoint in the Hugging Face layout."""
    out.mkdir(parents=True, exist_ok=True)
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    fixed = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False}
    rest = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "tie_word_embeddings": True, "rope_scaling": None}
    document = {**kind, **vars(config), **fixed, **rest, "initializer_range": 0.05, "use_cache": True}
    (out / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))


def main() -> None:
    """Parse the command line, train, measure the held-out loss and save."""
    parser = argparse.ArgumentParser(description="Train the small Llama checkpoint that the demos run on.")
    parser.add_argument("--text", type=Path, required=True, help="plain-text file of English books")
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--minutes", type=float, default=30.0, help="training time")
    parser.add_argument("--titles", nargs="*", default=[], help="use only books with one of these in their start line")
    parser.add_argument("--clean-text", type=Path, help="also write the cleaned text to this file")
    parser.add_argument("--start", type=Path, help="directory of an earlier checkpoint to train further")
    parser.add_argument("--peak-lr", type=float, default=TrainConfig.peak_lr, help="highest learning rate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    config = ModelConfig()
    chapters = read_chapters(args.text.read_text(encoding="utf-8"), args.titles)
    if args.clean_text:
        args.clean_text.write_text("\n\n\n".join(chapters) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer(chapters, config.vocab_size)
    # Each chapter is one text: BOS before it, EOS after it.
    stream = torch.tensor([i for item in tokenizer.encode_batch(chapters) for i in (*item.ids, EOS_ID)])
    # The held-out windows come from the middle, since the last book of a file may differ from the rest.
    cut, window = len(stream) * 3 // 5, 2048
    held_out = stream[cut : cut + 15 * window + 1].unfold(0, window + 1, window)
    stream = torch.cat((stream[:cut], stream[cut + 15 * window :]))
    model = Llama(config)
    if args.start:
        model.load_state_dict(load_file(args.start / "model.safetensors"))
    print(f"{len(chapters)} chapters, {len(stream):,} training tokens", flush=True)
    train(model, stream, TrainConfig(peak_lr=args.peak_lr), args.minutes, args.seed)
    save(args.out, model, tokenizer, config)
    with torch.no_grad():
        print(f"held-out loss {sum(model.loss(row[None]).item() for row in held_out) / len(held_out):.3f}")


if __name__ == "__main__":
    main()
