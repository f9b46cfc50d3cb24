package driversdk

import (
	"context"
	"maps"
	"slices"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func (h *handler[S]) create(ctx context.Context, c *call) (*driverv1.Result, error) {
	body := c.task.Request.GetCreate()
	req, err := h.request(ctx, c, body.GetMachine(), body.GetClass())
	if err != nil {
		return nil, err
	}
	data, values, err := h.classes.userData(ctx, req.Cluster, req.OperationID, body.GetMachine(), req.UserData)
	if err != nil {
		return nil, err
	}
	// The machine's name is one of the values, and no secret.
	maps.DeleteFunc(values, func(_, value string) bool { return value == req.Machine.Name })
	c.scrub = newScrubber(req.Class.Secret, slices.Collect(maps.Values(values))...)
	req.UserData = data

	made, err := h.createOrRecover(ctx, req)
	instance, err := c.checked("Create", made, err)
	c.providerID = instance.GetProviderId()

	return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{
		Instance: instance, LastKnownState: c.scrub.text(req.Machine.LastKnownState),
	}}}, err
}

// createOrRecover creates the instance unless an earlier attempt has [ENV-9].
// Several are the driver's to sort out: it sees Recover as well.
func (h *handler[S]) createOrRecover(ctx context.Context, req *Request[S]) (*Instance, error) {
	if req.Recover {
		found, err := h.find(ctx, req)
		switch CodeOf(err) {
		case OK, Uninitialized:
			if found != nil && (found.MachineUID == "" || found.MachineUID == req.Machine.UID) {
				return found, nil
			}
		case NotFound, OutOfRange, Unimplemented:
		default:
			return nil, err
		}
	}
	if err := req.BeginMutation(ctx); err != nil {
		return nil, err
	}

	made, err := spanned(ctx, "Create", func(ctx context.Context) (*Instance, error) { return h.driver.Create(ctx, req) })
	if made != nil && made.MachineName == "" && made.MachineUID == "" {
		// It was made for this machine; a driver need not repeat that.
		complete := *made
		complete.MachineName, complete.MachineUID = req.Machine.Name, req.Machine.UID
		made = &complete
	}

	return made, err
}
