package drivertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A machine is what the suite asks instances for.
type machine struct {
	*driverv1.Machine

	operations int
}

// newMachine makes up a machine; whatever is made for it is removed after the
// check.
func (s *suite) newMachine() *machine {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.made++
	m := &machine{Machine: &driverv1.Machine{
		Namespace: s.cfg.Class.Namespace, Name: fmt.Sprintf("%s%d", s.prefix, s.made),
		Uid: uid(),
	}}
	s.machines = append(s.machines, m)

	return m
}

// namesake is another machine of the same name.
func (s *suite) namesake(m *machine) *machine {
	other := &machine{Machine: proto.CloneOf(m.Machine)}
	other.Uid, other.ProviderId, other.NodeName = uid(), "", ""
	s.mu.Lock()
	s.machines = append(s.machines, other)
	s.mu.Unlock()

	return other
}

func uid() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails

	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// operation returns the id of the machine's next operation.
func (m *machine) operation(op driverv1.Operation) string {
	m.operations++

	return fmt.Sprintf("%s.%s.%d", m.GetUid(), bus.Verb(op), m.operations-1)
}

func (s *suite) createBody(m *machine) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Create{
		Create: &driverv1.CreateRequest{Machine: proto.CloneOf(m.Machine), Class: s.fetches.refs()},
	}}
}

func (s *suite) deleteBody(m *machine) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Delete{
		Delete: &driverv1.DeleteRequest{Machine: proto.CloneOf(m.Machine), Class: s.fetches.refs()},
	}}
}

func (s *suite) statusBody(m *machine) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Status{
		Status: &driverv1.StatusRequest{Machine: proto.CloneOf(m.Machine), Class: s.fetches.refs()},
	}}
}

func (s *suite) listBody() *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: s.fetches.refs()}}}
}

func createdOf(result *driverv1.Result) (*driverv1.Instance, error) {
	instance := result.GetCreate().GetInstance()
	if result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		return nil, fmt.Errorf("create failed: %s", said(result))
	}
	if instance.GetProviderId() == "" {
		return nil, errors.New("create succeeded without an instance that has a provider_id")
	}

	return instance, nil
}

// remove asks for the machine's instance to be gone, by a new operation.
func (s *suite) remove(ctx context.Context, m *machine) error {
	result, err := s.run(ctx, m, m.operation(driverv1.Operation_OPERATION_DELETE), s.deleteBody(m))
	if err == nil && result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		err = fmt.Errorf("delete failed: %s", said(result))
	}

	return err
}

// list asks for the instances of the class.
func (s *suite) list(ctx context.Context) ([]*driverv1.Instance, error) {
	result, err := s.read(ctx, s.cfg.Class.Name, s.listBody())
	if err != nil {
		return nil, err
	}
	if result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		return nil, fmt.Errorf("list failed: %s", said(result))
	}

	return result.GetList().GetInstances(), nil
}

// instances returns those of a machine in the list, once it has settled.
func (s *suite) instances(ctx context.Context, m *machine) ([]string, error) {
	if err := s.settled(ctx); err != nil {
		return nil, err
	}

	return s.listed(ctx, m)
}

// listed returns a machine's instances in the list as it is.
func (s *suite) listed(ctx context.Context, m *machine) ([]string, error) {
	list, err := s.list(ctx)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, i := range list {
		if i.GetMachineUid() == m.GetUid() || i.GetMachineUid() == "" && i.GetMachineName() == m.GetName() {
			ids = append(ids, i.GetProviderId())
		}
	}
	slices.Sort(ids)

	return ids, nil
}

// none fails when the machine has an instance.
func (s *suite) none(ctx context.Context, m *machine, why string) error {
	ids, err := s.instances(ctx, m)
	if err == nil && len(ids) > 0 {
		err = fmt.Errorf("%s, and yet there is an instance: %s", why, strings.Join(ids, ", "))
	}

	return err
}

// one fails unless the machine has this very instance and no other.
func (s *suite) one(ctx context.Context, m *machine, providerID string) error {
	var ids []string
	err := s.eventually(ctx, "list shows the instance", func() (bool, error) {
		var err error
		ids, err = s.instances(ctx, m)

		return len(ids) > 0, err
	})
	if err == nil && (len(ids) != 1 || ids[0] != providerID) {
		err = fmt.Errorf("want one instance, %s, and list shows %s", providerID, strings.Join(ids, ", "))
	}

	return err
}

// cleanUp removes what the machines so far may have, and gives node groups their
// sizes back. What could not be done stays for the next time.
func (s *suite) cleanUp(ctx context.Context) error {
	s.mu.Lock()
	machines := s.machines
	s.machines = nil
	s.mu.Unlock()
	var errs []error
	var left []*machine
	for _, m := range machines {
		m.ProviderId = "" // all that carry the machine's uid
		if err := s.remove(ctx, m); err != nil {
			errs = append(errs, fmt.Errorf("machine %s: %w", m.GetName(), err))
			left = append(left, m)
		}
	}
	s.mu.Lock()
	s.machines = append(s.machines, left...)
	s.mu.Unlock()

	return errors.Join(append(errs, s.restoreGroups(ctx))...)
}

// leftovers fails while there are instances with a name of ours.
func (s *suite) leftovers(ctx context.Context) error {
	var left []string
	err := s.eventually(ctx, "list shows no instance of ours", func() (bool, error) {
		list, err := s.list(ctx)
		left = nil
		for _, i := range list {
			if strings.HasPrefix(i.GetMachineName(), s.prefix) {
				left = append(left, i.GetProviderId())
			}
		}

		return len(left) == 0, err
	})
	if len(left) > 0 {
		err = fmt.Errorf("instances are left: %s", strings.Join(left, ", "))
	}

	return err
}
