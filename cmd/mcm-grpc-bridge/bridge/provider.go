package bridge

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/infrapb"
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/external"
)

// answerGrace is how long an answer may be late, before the stream ends. It is shorter than
// what the replica grants a call that ignores its deadline.
const answerGrace = 5 * time.Second

// A provider is a stream as the adapter of driversdk/external calls it: one call at a time, each
// bound to the context of its operation.
type provider struct {
	stream *stream
	ctx    context.Context // the interface of 2018 has none
}

var _ external.ContextProvider = provider{}

// WithContext returns the provider for one operation.
func (p provider) WithContext(ctx context.Context) external.ExternalDriverProvider {
	return provider{p.stream, ctx}
}

// Create asks the client for an instance.
func (p provider) Create(class *external.MachineClassMeta, credentials, machineID, machineName string) (id, node string, err error) {
	m, err := p.ask(typeCreate, class, credentials, machineID, machineName)
	if err != nil {
		return "", "", err
	}
	r := m.GetCreateresponse()

	return r.GetProviderID(), r.GetNodename(), said(r.GetError())
}

// Delete asks the client to remove an instance.
func (p provider) Delete(class *external.MachineClassMeta, credentials, machineID string) error {
	m, err := p.ask(typeDelete, class, credentials, machineID, "")
	if err != nil {
		return err
	}

	return said(m.GetDeleteresponse().GetError())
}

// List asks the client for its instances.
func (p provider) List(class *external.MachineClassMeta, credentials, machineID string) (map[string]string, error) {
	m, err := p.ask(typeList, class, credentials, machineID, "")
	if err != nil {
		return nil, err
	}
	r, names := m.GetListresponse(), map[string]string{}
	for _, machine := range r.GetList() {
		names[machine.GetMachineID()] = machine.GetMachineName()
	}

	return names, said(r.GetError())
}

// ask sends a request and returns the answer.
func (p provider) ask(
	operationType string, class *external.MachineClassMeta, credentials, machineID, machineName string,
) (*infrapb.DriverSide, error) {
	s := p.stream
	r := s.expect(operationType, &infrapb.MCMsideOperationParams{
		MachineClassMetaData: &infrapb.MachineClassMeta{Name: class.Name, Revision: class.Revision},
		Credentials:          credentials, MachineID: machineID, MachineName: machineName,
	})
	if s.ctx.Err() != nil { // select would choose at random
		return nil, driversdk.Errorf(driversdk.Unavailable, "the driver left before the %s began: %w", operationType, s.why())
	}
	select {
	case s.outbox <- r.MCMside:
	case <-s.ctx.Done():
		return nil, driversdk.Errorf(driversdk.Unavailable, "the driver left before the %s began: %w", operationType, s.why())
	}
	if m := p.await(r); m != nil {
		return m, nil
	}
	err := driversdk.Errorf(driversdk.Unavailable, "the driver has not answered a %s: %w", operationType, s.why())
	if operationType == typeList {
		return nil, err
	}

	return nil, driversdk.OutcomeUnknown(err)
}

// await returns the answer to a request that was sent, or nil once the stream has ended. It ends the
// stream itself some seconds after the operation's context.
func (p provider) await(r *request) *infrapb.DriverSide {
	s, over := p.stream, p.ctx.Done()
	late := time.NewTimer(math.MaxInt64) // until the context ends
	defer late.Stop()
	for {
		select {
		case m := <-r.answered:
			return m
		case <-s.ctx.Done():
			select {
			case m := <-r.answered: // came just before
				return m
			default:
				return nil
			}
		case <-over:
			over = nil
			late.Reset(p.patience(r))
		case <-late.C:
			s.end(fmt.Errorf("a %s had no answer within %s of its end: %w", r.GetOperationType(), answerGrace, context.Cause(p.ctx)))
		}
	}
}

// patience is how long an answer may still take when its operation has ended. A list that was only
// cancelled has until its deadline: to lose the driver for it would cost more.
func (p provider) patience(r *request) time.Duration {
	if deadline, ok := p.ctx.Deadline(); ok && r.GetOperationType() == typeList {
		return answerGrace + max(0, time.Until(deadline))
	}

	return answerGrace
}

// said makes an error of a client's text; no text is none. The replica shortens it when it has
// taken secrets out: half a secret would not be found.
func said(text string) error {
	if text == "" {
		return nil
	}

	return errors.New(strings.ToValidUTF8(text, ""))
}
