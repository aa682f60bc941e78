"""The script of docs/token-pipeline.md: `python docs/examples/token_pipeline.py`."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.pipeline import Uniform


class Language(L.LightningModule):
    """Counts: every token is the one before plus one."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        (ids,) = batch
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (ids,) = batch
        self.log("val_loss", self.model(input_ids=ids, labels=ids).loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(0, workers=True, verbose=False)
    ids = (torch.arange(64)[:, None] + torch.arange(32)) % 16
    loader = DataLoader(TensorDataset(ids), batch_size=4)
    trainer = L.Trainer(
        strategy=TokenPipelineStrategy(slicing=Uniform(4)),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Language(), loader, loader)
    loss = float(trainer.callback_metrics["val_loss"])
    assert loss < 0.5, loss
