"""The callback behind `ema=polyak`."""

from lightning.pytorch import Callback


class Ema(Callback):
    """Keeps the average; at the end says how far the weights are from it."""

    def __init__(self, settings) -> None:
        self.settings = settings
        self.average = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        decay = self.settings.ema_decay(trainer.global_step)
        for name, parameter in pl_module.named_parameters():
            value = parameter.detach()
            old = self.average.get(name, value)
            self.average[name] = old * decay + value * (1 - decay)

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            print(f"acme averaged {len(self.average)} parameters")
