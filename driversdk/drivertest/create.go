package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// ownerUID is the uid of the control cluster that the suite plays.
const ownerUID = "conformance"

const (
	create = driverv1.Operation_OPERATION_CREATE
	remove = driverv1.Operation_OPERATION_DELETE
)

// again repeats a create: with the id it had, and with those of new operations.
func (s *suite) again(ctx context.Context, m *machine, id, providerID string, change func(*driverv1.Envelope)) error {
	ids := []string{id}
	for range s.cfg.Repeat {
		ids = append(ids, m.operation(create))
	}
	for _, id := range ids {
		result, err := s.attempt(ctx, m, id, s.createBody(m), change)
		if err != nil {
			return err
		}
		instance, err := createdOf(result)
		if err != nil {
			return fmt.Errorf("asked again (operation %s): %w", id, err)
		}
		if instance.GetProviderId() != providerID {
			return fmt.Errorf("asked again (operation %s), it returned %s, where there was %s already", id, instance.GetProviderId(), providerID)
		}
	}

	return s.one(ctx, m, providerID)
}

// firstTries is how often an instance is asked for of which nobody knows what came.
const firstTries = 3

// first makes a machine's instance by an operation whose id is returned. On a machine
// that stalls the operations stream may not answer in time: the operation is attempted
// again then, as the manager does.
func (s *suite) first(ctx context.Context) (m *machine, id, providerID string, err error) {
	m = s.newMachine()
	id = m.operation(create)
	var result *driverv1.Result
	for try := uint32(1); try <= firstTries; try++ {
		result, err = s.attempt(ctx, m, id, s.createBody(m),
			func(env *driverv1.Envelope) { env.Attempt, env.Recover = try, try > 1 })
		if err != nil {
			return m, id, "", err
		}
		if !result.GetOutcomeUnknown() {
			break
		}
	}
	instance, err := createdOf(result)
	if err != nil {
		return m, id, "", err
	}

	return m, id, instance.GetProviderId(), s.settled(ctx)
}

func checkCreateTwice(ctx context.Context, s *suite) error {
	m, id, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}

	return s.again(ctx, m, id, providerID, func(*driverv1.Envelope) {})
}

func checkRecover(ctx context.Context, s *suite) error {
	m, id, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	if err := s.again(ctx, m, id, providerID, recovering); err != nil {
		return err
	}
	fresh := s.newMachine() // with nothing to be found
	result, err := s.attempt(ctx, fresh, fresh.operation(create), s.createBody(fresh), recovering)
	if err != nil {
		return err
	}
	instance, err := createdOf(result)
	if err != nil {
		return fmt.Errorf("with recover and nothing to be found: %w", err)
	}

	return s.one(ctx, fresh, instance.GetProviderId())
}

// rival asks for the instance of another machine of a name that is taken.
func (s *suite) rival(ctx context.Context) (taken bool, err error) {
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return false, err
	}
	other := s.namesake(m)
	result, err := s.run(ctx, other, other.operation(create), s.createBody(other))
	if err != nil {
		return false, err
	}
	switch result.GetStatus().GetCode() {
	case driverv1.Code_CODE_ALREADY_EXISTS:
		taken = true
	case driverv1.Code_CODE_OK: // the cloud does not mind
		if id := result.GetCreate().GetInstance().GetProviderId(); id == providerID {
			return false, fmt.Errorf("another machine of the same name was given the instance %s of the first", id)
		}
	default:
		return false, fmt.Errorf("another machine of a name that is taken was answered %s, not AlreadyExists", said(result))
	}
	list, err := s.list(ctx)
	if err != nil {
		return taken, err
	}
	for _, i := range list {
		if i.GetProviderId() == providerID && (i.GetMachineUid() == "" || i.GetMachineUid() == m.GetUid()) {
			return taken, nil
		}
	}

	return taken, fmt.Errorf("instance %s was not left alone when another machine of its name was asked for", providerID)
}

func checkNamesake(ctx context.Context, s *suite) error {
	_, err := s.rival(ctx)

	return err
}

func checkUniqueName(ctx context.Context, s *suite) error {
	if s.session().GetCreateIdentity() != driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME {
		return unboundf("binds drivers whose create identity is unique_name")
	}
	taken, err := s.rival(ctx)
	if err == nil && !taken {
		err = fmt.Errorf("the cloud let two machines of one name have instances: the name is not what identifies a create")
	}

	return err
}

func checkToken(ctx context.Context, s *suite) error {
	if s.session().GetCreateIdentity() != driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN {
		return unboundf("binds drivers whose create identity is token")
	}
	if s.cfg.Cloud.Tokens == nil {
		return skipf("only the cloud sees the token (Config.Cloud.Tokens)")
	}
	m, id, _, err := s.first(ctx)
	if err != nil {
		return err
	}
	tokens, err := s.cfg.Cloud.Tokens(ctx, m.GetName())
	if err != nil {
		return err
	}
	if !slices.Equal(tokens, []string{id}) {
		return fmt.Errorf("the cloud was given tokens %q, where the operation is %q", tokens, id)
	}

	return nil
}

func checkCreatedForGood(ctx context.Context, s *suite) error {
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	m.ProviderId = providerID
	if err := s.one(ctx, m, providerID); err != nil {
		return err
	}

	return s.found(ctx, m, providerID)
}

// found fails unless status returns this instance, initialized or not.
func (s *suite) found(ctx context.Context, m *machine, providerID string) error {
	if err := s.has(driverv1.Operation_OPERATION_STATUS); err != nil {
		return nil //nolint:nilerr // list has shown it
	}
	result, err := s.read(ctx, m.GetName(), s.statusBody(m))
	if err != nil {
		return err
	}
	switch result.GetStatus().GetCode() {
	case driverv1.Code_CODE_OK, driverv1.Code_CODE_UNINITIALIZED:
		if id := result.GetInstanceStatus().GetInstance().GetProviderId(); id != providerID {
			return fmt.Errorf("status returned instance %q, not %q", id, providerID)
		}

		return nil
	case driverv1.Code_CODE_UNIMPLEMENTED:
		if s.plain {
			return nil
		}
	default:
	}

	return fmt.Errorf("status was answered %s", said(result))
}

// checkDeadline gives a create less time than any cloud needs, and one less than
// the class can be fetched in.
func checkDeadline(ctx context.Context, s *suite) error {
	for _, timeout := range []time.Duration{time.Millisecond, 100 * time.Millisecond} {
		release := func() {}
		if timeout > time.Millisecond {
			release = s.fetches.hold()
		}
		m := s.newMachine()
		result, err := s.attempt(ctx, m, m.operation(create), s.createBody(m),
			func(env *driverv1.Envelope) { env.Timeout = durationpb.New(timeout) })
		release()
		if err != nil {
			return err
		}
		switch code := result.GetStatus().GetCode(); {
		case code == driverv1.Code_CODE_OK, result.GetOutcomeUnknown():
			continue // it was quicker, or the cloud was at it already
		case code != driverv1.Code_CODE_DEADLINE_EXCEEDED:
			return fmt.Errorf("a create with %s to do it in was answered %s, not DeadlineExceeded", timeout, said(result))
		}
		if err := pause(ctx, silence); err != nil { // for what must not be begun
			return err
		}
		if err := s.none(ctx, m, "the deadline had passed with nothing begun"); err != nil {
			return err
		}
	}

	return nil
}

// checkUID looks for an instance by the machine's uid alone.
func checkUID(ctx context.Context, s *suite) error {
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	list, err := s.list(ctx)
	if err != nil {
		return err
	}
	for _, i := range list {
		if i.GetProviderId() == providerID && i.GetMachineUid() == m.GetUid() {
			return nil
		}
	}
	other := s.namesake(m)
	result, err := s.read(ctx, other.GetName(), s.statusBody(other))
	if err != nil {
		return err
	}
	if id := result.GetInstanceStatus().GetInstance().GetProviderId(); id == providerID {
		return fmt.Errorf("list does not tell the uid of instance %s, and status gives it to another machine of its name", id)
	}

	return s.found(ctx, m, providerID)
}

func checkOwner(ctx context.Context, s *suite) error {
	_, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	list, err := s.list(ctx)
	if err != nil {
		return err
	}
	for _, i := range list {
		if i.GetProviderId() != providerID {
			continue
		}
		if got := i.GetOwner(); got != ownerUID {
			return fmt.Errorf("instance %s was made for owner %q, and is listed with owner %q", providerID, ownerUID, got)
		}

		return nil
	}

	return fmt.Errorf("list does not hold instance %s", providerID)
}

func checkInitialize(ctx context.Context, s *suite) error {
	if err := s.has(driverv1.Operation_OPERATION_INITIALIZE); err != nil {
		return err
	}
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	m.ProviderId = providerID
	for range s.cfg.Repeat {
		if err := s.initialize(ctx, m); err != nil {
			return err
		}
	}

	return s.one(ctx, m, providerID)
}

func (s *suite) initialize(ctx context.Context, m *machine) error {
	result, err := s.run(ctx, m, m.operation(driverv1.Operation_OPERATION_INITIALIZE), &driverv1.Envelope{
		Body: &driverv1.Envelope_Initialize{Initialize: &driverv1.InitializeRequest{Machine: m.Machine, Class: s.fetches.refs()}},
	})
	switch {
	case err != nil:
		return err
	case s.plain && result.GetStatus().GetCode() == driverv1.Code_CODE_UNIMPLEMENTED:
		return unboundf("the driver does not implement initialize")
	case result.GetStatus().GetCode() != driverv1.Code_CODE_OK:
		return fmt.Errorf("initialize was answered %s", said(result))
	default:
		return nil
	}
}

func checkDeleteAbsent(ctx context.Context, s *suite) error {
	for range s.cfg.Repeat {
		if err := s.remove(ctx, s.newMachine()); err != nil {
			return fmt.Errorf("of a machine that never had an instance: %w", err)
		}
	}
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	m.ProviderId = providerID
	for n := range 1 + s.cfg.Repeat {
		if err := s.remove(ctx, m); err != nil {
			return fmt.Errorf("deletion %d of one instance: %w", n+1, err)
		}
	}

	return nil
}

// checkDeleteFinds deletes an instance by its machine's name and uid, and one by its
// provider id alone: a machine that was made anew has another uid than its instance
// says, and an instance that belongs to no machine may say none.
func checkDeleteFinds(ctx context.Context, s *suite) error {
	for _, named := range []bool{false, true} {
		m, _, providerID, err := s.first(ctx)
		if err != nil {
			return err
		}
		by, how := m, "by name and uid"
		if named {
			by, how = s.newMachine(), "by provider id, for a machine of another name and uid"
			by.ProviderId = providerID
		}
		if err := s.remove(ctx, by); err != nil {
			return fmt.Errorf("%s: %w", how, err)
		}
		if err := s.gone(ctx, m); err != nil {
			return fmt.Errorf("%s: %w", how, err)
		}
	}

	return nil
}

// gone waits until list shows nothing of a machine: it may be removing it.
func (s *suite) gone(ctx context.Context, m *machine) error {
	var ids []string
	err := s.eventually(ctx, "list shows it no longer", func() (bool, error) {
		var err error
		ids, err = s.listed(ctx, m)

		return len(ids) == 0, err
	})
	if len(ids) > 0 {
		return fmt.Errorf("delete succeeded, and yet list shows %s", strings.Join(ids, ", "))
	}

	return err
}

func checkDeleteForGood(ctx context.Context, s *suite) error {
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	m.ProviderId = providerID
	if err := s.removeUnasked(ctx, m); err != nil {
		return err
	}
	if err := s.remove(ctx, m); err != nil {
		return err
	}
	if err := s.gone(ctx, m); err != nil {
		return err
	}
	for range s.cfg.Repeat {
		if err := s.none(ctx, m, "delete succeeded"); err != nil {
			return err
		}
	}

	return nil
}

// removeUnasked asks for a machine's instance to be gone while the manager cannot be
// asked for the class. Most drivers fail then; one that does not must have done it.
func (s *suite) removeUnasked(ctx context.Context, m *machine) error {
	if err := s.leaveFetches(ctx); err != nil {
		return err
	}
	result, err := s.run(ctx, m, m.operation(remove), s.deleteBody(m))
	if err := errors.Join(err, s.answerFetches(ctx)); err != nil {
		return fmt.Errorf("while nobody answers fetches: %w", err)
	}
	if result.GetStatus().GetCode() == driverv1.Code_CODE_OK {
		return s.gone(ctx, m)
	}

	return nil
}
