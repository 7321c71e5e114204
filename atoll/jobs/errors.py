"""What can be wrong with a job, as values that name the place.

JobMistake: one wish cannot be taken, with the field, what was given and what to do.
"""


class JobMistake(ValueError):
    """A wish of a job cannot be taken. `field`: its path, such as policy.topology or ext_ml_gpu_count."""

    def __init__(self, field: str, value: object, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.value = value
        self.message = message
