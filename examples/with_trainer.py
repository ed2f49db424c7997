"""transformers' Trainer: one argument more. A small GPT-2, made from a config, learns to count; nothing is downloaded.

torchrun --standalone --nproc-per-node 2 examples/with_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import dgc
from dgc.integrations.transformers import Trainer

STEPS, BATCH = 200, 32


def counts() -> torch.Tensor:
    """From any digit, up or down, modulo 10: 3 4 5 6 7 8, 2 1 0 9 8 7."""
    first, way = torch.arange(10).repeat(2), torch.tensor([1, -1]).repeat_interleave(10)
    return (first[:, None] + way[:, None] * torch.arange(6)) % 10


def main() -> None:
    set_seed(0)
    sizes = {"vocab_size": 10, "n_positions": 6, "n_embd": 64, "n_layer": 2, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    model, rows = GPT2LMHeadModel(config), counts()
    data = [{"input_ids": row, "labels": row} for row in rows] * 32
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        report_to="none",
        per_device_train_batch_size=BATCH,
        max_grad_norm=1.0,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_steps=50,
        ddp_find_unused_parameters=False,
    )
    sparsity = dgc.warmup(epochs=2, stages=4, end=0.99, steps_per_epoch=len(data) // (2 * BATCH))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = dgc.Config(sparsity=sparsity)
    trainer = Trainer(
        model, arguments, train_dataset=data, optimizers=(sgd, None), compression=compression
    )
    trainer.train()

    model.eval()
    found = model(rows).logits[:, 1:-1].argmax(2)  # from the second digit on the direction is known
    accuracy = (found == rows[:, 2:]).float().mean().item()
    if trainer.is_world_process_zero():
        sent = trainer.optimizer.optimizer.report().as_dict() if trainer.args.world_size > 1 else {}
        print(f"accuracy {accuracy:.3f}, compression {sent.get('total_compression', 1):.1f}")


if __name__ == "__main__":
    main()
