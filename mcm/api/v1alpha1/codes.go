package v1alpha1

// Names of the drivers' error codes as they stand in lastOperation.errorCode and in texts. They are those of gRPC, and
// Uninitialized. The cluster-autoscaler backs off from a node group on ErrorCodeResourceExhausted.
const (
	ErrorCodeOK                 = "OK"
	ErrorCodeCanceled           = "Canceled"
	ErrorCodeUnknown            = "Unknown"
	ErrorCodeInvalidArgument    = "InvalidArgument"
	ErrorCodeDeadlineExceeded   = "DeadlineExceeded"
	ErrorCodeNotFound           = "NotFound"
	ErrorCodeAlreadyExists      = "AlreadyExists"
	ErrorCodePermissionDenied   = "PermissionDenied"
	ErrorCodeResourceExhausted  = "ResourceExhausted"
	ErrorCodeFailedPrecondition = "FailedPrecondition"
	ErrorCodeAborted            = "Aborted"
	ErrorCodeOutOfRange         = "OutOfRange"
	ErrorCodeUnimplemented      = "Unimplemented"
	ErrorCodeInternal           = "Internal"
	ErrorCodeUnavailable        = "Unavailable"
	ErrorCodeDataLoss           = "DataLoss"
	ErrorCodeUnauthenticated    = "Unauthenticated"
	ErrorCodeUninitialized      = "Uninitialized" // the instance exists and waits for its initialization
)
