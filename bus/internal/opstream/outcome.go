package opstream

import (
	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// notKept stands for the text of an outcome whose replica could not seal it.
const notKept = "the driver's own words were not kept: its replica did not know the control plane's key"

// InstanceOf returns what a mutation's result says beside its status.
func InstanceOf(r *driverv1.Result) (instance *driverv1.Instance, lastKnownState string) {
	switch p := r.GetPayload().(type) {
	case *driverv1.Result_Create:
		return p.Create.GetInstance(), p.Create.GetLastKnownState()
	case *driverv1.Result_Initialize:
		return p.Initialize.GetInstance(), p.Initialize.GetLastKnownState()
	case *driverv1.Result_Delete:
		return nil, p.Delete.GetLastKnownState()
	default:
		return nil, ""
	}
}

// ResultOf makes a result of a stored outcome. Partial says that its sealed part
// could not be read.
func ResultOf(c *driverv1.Claim, key *bus.SealKey) (r *driverv1.Result, partial bool) {
	o, sealed := c.GetOutcome(), &driverv1.SealedOutcome{}
	partial = true
	if key != nil && o.GetSealed() != nil {
		// Any writer of this provider's claims can seal one: the seal keeps others from
		// reading, but does not authenticate the sender.
		err := key.Open(o.GetSealed(), o.GetSealed().GetSender(), sealed)
		partial = err != nil || sealed.GetOperationId() != c.GetOperationId()
	}
	if partial {
		sealed = &driverv1.SealedOutcome{}
		if o.GetCode() != driverv1.Code_CODE_OK {
			sealed.Message = notKept
		}
	}
	r = &driverv1.Result{Status: &driverv1.Status{Code: o.GetCode(), Message: sealed.GetMessage(), RetryAfter: o.GetRetryAfter()}}
	var instance *driverv1.Instance
	if o.GetProviderId() != "" {
		instance = &driverv1.Instance{
			ProviderId: o.GetProviderId(), NodeName: o.GetNodeName(), Addresses: o.GetAddresses(), MachineName: c.GetName(),
		}
	}
	state := sealed.GetLastKnownState()
	switch c.GetOperation() {
	case driverv1.Operation_OPERATION_CREATE:
		r.Payload = &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: instance, LastKnownState: state}}
	case driverv1.Operation_OPERATION_INITIALIZE:
		r.Payload = &driverv1.Result_Initialize{Initialize: &driverv1.InitializeResponse{Instance: instance, LastKnownState: state}}
	case driverv1.Operation_OPERATION_DELETE:
		r.Payload = &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{LastKnownState: state}}
	default:
	}

	return r, partial
}
