"""Hugging Face Accelerate: one line after prepare(). Accumulates two batches a step, and saves its state.

accelerate launch --cpu --num_processes 2 examples/with_accelerate.py      (or torchrun --nproc-per-node 2)
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn

import dgc
from dgc.integrations.accelerate import compress

EPOCHS, BATCH, CLIP_NORM = 30, 16, 5.0


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = torch.utils.data.TensorDataset(x[:1500], y[:1500])
    loader = torch.utils.data.DataLoader(train, batch_size=BATCH, shuffle=True)

    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sparsity = dgc.warmup(epochs=4, stages=4, end=0.99, steps_per_epoch=len(loader) // 2)
    compress(accelerator, model, optimizer, dgc.Config(sparsity=sparsity, clip_norm=CLIP_NORM))

    for _ in range(EPOCHS):
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                if accelerator.sync_gradients:
                    # Done by then: returns the norm.
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()

    folder = accelerator.gather_for_metrics([tempfile.mkdtemp()], use_gather_object=True)[0]
    accelerator.save_state(folder)  # with each rank's residuals
    accelerator.wait_for_everyone()  # rank 0 writes the model
    accelerator.load_state(folder)
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    sent = optimizer.optimizer.report().as_dict() if accelerator.num_processes > 1 else {}
    accelerator.print(
        f"accuracy {accuracy:.3f}, compression {sent.get('total_compression', 1):.1f}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
