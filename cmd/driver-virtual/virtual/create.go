package virtual

import (
	"context"
	"errors"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// A create whose answer is lost is sent again at once if the cloud can identify it:
// only this operation has the token with which to find out the outcome.
const (
	createTries = 4
	createPause = 100 * time.Millisecond // doubles with each try
)

// Create creates the machine's instance, or returns the existing one [CREATE-1].
func (d *Driver) Create(ctx context.Context, req *driversdk.Request[Spec]) (*driversdk.Instance, error) {
	if d.IgnoreDeadlines {
		ctx = context.WithoutCancel(ctx)
	}
	cloud, err := cloudOf(req.Class)
	if err != nil {
		return nil, err
	}
	existing, err := d.existing(ctx, cloud, req)
	if err != nil || existing != nil {
		return existing, err
	}
	req.Progress("creating instance " + req.Machine.Name)
	spec := req.Class.Spec
	made, unanswered, err := d.send(ctx, cloud, req, cloudapi.CreateRequest{
		Name: req.Machine.Name, MachineType: spec.MachineType, Region: spec.Region, Zone: spec.Zone,
		Tags: tags(req), UserData: req.UserData,
		IdempotencyToken: req.OperationID, Identity: identities[d.Identity],
	})
	if err == nil {
		return instanceOf(made), nil
	}
	found, err := conflicting(ctx, cloud, req, err)
	if unanswered {
		err = driversdk.OutcomeUnknown(err)
	}

	return found, err
}

// existing returns the machine's instance, or nil. If a lost create was repeated and
// there are several, it deletes all but the oldest.
func (d *Driver) existing(
	ctx context.Context, cloud *cloudapi.Client, req *driversdk.Request[Spec],
) (*driversdk.Instance, error) {
	list, err := owned(ctx, cloud, req)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	if len(list) > 1 {
		if !req.Recover {
			return nil, tooMany(req, list)
		}
		for _, surplus := range list[1:] {
			req.Progress("removing surplus instance " + surplus.ID)
			if err := remove(ctx, cloud, req, surplus.ID); err != nil {
				return nil, err
			}
		}
	}

	return instanceOf(&list[0]), nil
}

// send sends the create until it is answered. unanswered means that some try may have
// had an effect that the returned error does not cover.
func (d *Driver) send(
	ctx context.Context, cloud *cloudapi.Client, req *driversdk.Request[Spec], body cloudapi.CreateRequest,
) (made *cloudapi.Instance, unanswered bool, err error) {
	tries, pause := createTries, createPause
	if d.Identity == driversdk.IdentityNone {
		tries = 1 // a repetition would create a second instance
	}
	for {
		if err := req.BeginMutation(ctx); err != nil {
			return nil, unanswered, err
		}
		made, err = cloud.Create(ctx, body)
		unanswered = unanswered || lost(err)
		_, answered := errors.AsType[*cloudapi.Error](err)
		tries--
		if err == nil || answered && !lost(err) || tries == 0 {
			return made, unanswered, err
		}
		req.Progress("creating instance " + body.Name + ": the answer was lost; retrying")
		select {
		case <-ctx.Done():
			return nil, unanswered, err
		case <-time.After(pause):
			pause *= 2
		}
	}
}

// conflicting reads the instance because of which the cloud refused a create. It may be
// the machine's own [CREATE-2].
func conflicting(
	ctx context.Context, cloud *cloudapi.Client, req *driversdk.Request[Spec], refusal error,
) (*driversdk.Instance, error) {
	var e *cloudapi.Error
	if !errors.As(refusal, &e) || e.InstanceID == "" {
		return nil, coded(refusal)
	}
	if e.Code != cloudapi.CodeAlreadyExists && e.Code != cloudapi.CodeTokenMismatch {
		return nil, coded(refusal)
	}
	found, err := cloud.Get(ctx, e.InstanceID)
	switch {
	case cloudapi.CodeOf(err) == cloudapi.CodeNotFound:
		return nil, driversdk.Errorf(driversdk.Aborted, "instance %s, which conflicted with the create, is gone now: %w", e.InstanceID, refusal)
	case err != nil:
		return nil, coded(err)
	case !mine(req, found):
		return nil, coded(refusal)
	}

	return instanceOf(found), nil
}
