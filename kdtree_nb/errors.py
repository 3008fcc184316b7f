"""Exceptions of the package. Each message says the operation, what was expected, what was found and the remedy."""


class KdtreeError(Exception):
    """Base of every exception that the package defines itself (bad arguments raise ValueError or TypeError)."""


class KernelBuildError(KdtreeError):
    """The native kernels could not be compiled: no compiler, a compiler error, a build lock, a read-only cache."""


class KernelUnavailableError(KdtreeError):
    """An operation has no kernel for the device asked for, or the sources changed under a running process."""


class KdtrError(KdtreeError):
    """A KDTR file is damaged, hostile, too new or lacks a tensor. Names the file, the tensor and the expectation."""


class CheckpointError(KdtreeError):
    """A model file or folder does not describe a model that this package can run. Names the field or tensor."""


class CorpusError(KdtreeError):
    """The text to train or measure on is not the pinned one. Names what differs: package, version, files or hash."""


class DeviceMemoryError(KdtreeError):
    """The memory of a device does not hold what was asked for. Names the sizes and what to make smaller."""


class NonFiniteError(KdtreeError):
    """A model or drafter produced NaN logits. Names the stream and the position."""


class QueueFullError(KdtreeError):
    """An engine has as many streams, running and waiting, as it takes. Names the limits and what frees a place."""


class CalibrationError(KdtreeError):
    """No cost model was measured for this device, model, dtype and build, or the one found is stale or damaged."""


class RankError(KdtreeError):
    """A rank of a tensor-parallel run is gone, late, or has loaded or was asked for something else. Names the rank."""
