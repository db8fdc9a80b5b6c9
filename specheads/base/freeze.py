"""What is changed of a caller's model, and how it is given back."""

from collections.abc import Callable

from transformers import PreTrainedModel

from specheads.base.selfcheck import check
from specheads.base.weight_layout import column_major


def freeze(model: PreTrainedModel) -> Callable[[], None]:
    """Put a model in eval mode, without gradients, matrices column by column, and try it.

    Raises:
        ValueError: As `selfcheck.check`; the model is then as it was.

    Returns:
        What gives back each module's mode, each parameter's flag and each matrix's strides.
    """
    training = {module: module.training for module in model.modules()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval().requires_grad_(False)
    restore_layout = column_major(model)

    def undo() -> None:
        for module, flag in training.items():
            module.training = flag
        for parameter in learning:
            parameter.requires_grad_()
        restore_layout()

    try:
        check(model)
    except ValueError:
        undo()
        raise
    return undo
