package drivertest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/nats-io/nuid"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// status asks for a machine's instance.
func (s *suite) status(ctx context.Context, m *machine) (*driverv1.Result, error) {
	if err := s.has(driverv1.Operation_OPERATION_STATUS); err != nil {
		return nil, err
	}
	result, err := s.read(ctx, m.GetName(), s.statusBody(m))
	if err == nil && s.plain && result.GetStatus().GetCode() == driverv1.Code_CODE_UNIMPLEMENTED {
		err = unboundf("the driver does not implement status")
	}

	return result, err
}

// unchanged fails when do changes what list shows.
func (s *suite) unchanged(ctx context.Context, do func() error) error {
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	if err := s.one(ctx, m, providerID); err != nil {
		return err
	}
	before, err := s.listedIDs(ctx)
	if err != nil {
		return err
	}
	for range s.cfg.Repeat {
		if err := do(); err != nil {
			return err
		}
	}
	after, err := s.listedIDs(ctx)
	if err == nil && !slices.Equal(before, after) {
		err = fmt.Errorf("list shows %q, where it showed %q before", after, before)
	}
	if err != nil {
		return err
	}

	return s.one(ctx, m, providerID)
}

// listedIDs returns the provider ids of all instances of the class.
func (s *suite) listedIDs(ctx context.Context) ([]string, error) {
	if err := s.settled(ctx); err != nil {
		return nil, err
	}
	list, err := s.list(ctx)
	ids := make([]string, len(list))
	for n, i := range list {
		ids[n] = i.GetProviderId()
	}
	slices.Sort(ids)

	return ids, err
}

func checkStatusChangesNothing(ctx context.Context, s *suite) error {
	absent := s.newMachine()
	if err := s.unchanged(ctx, func() error {
		_, err := s.status(ctx, absent)

		return err
	}); err != nil {
		return err
	}

	return s.none(ctx, absent, "it was only asked for its status")
}

func checkStatusAbsent(ctx context.Context, s *suite) error {
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	if err := s.remove(ctx, m); err != nil {
		return err
	}
	if err := s.gone(ctx, m); err != nil {
		return err
	}
	removed := *m
	byID := s.newMachine()
	byID.Uid, byID.Name, byID.ProviderId = m.GetUid(), m.GetName(), providerID
	for _, absent := range []struct {
		what string
		*machine
	}{
		{"that never was", s.newMachine()}, {"that was removed", &removed}, {"that was removed, by its provider id", byID},
	} {
		result, err := s.status(ctx, absent.machine)
		if err != nil {
			return err
		}
		if result.GetStatus().GetCode() != driverv1.Code_CODE_NOT_FOUND {
			return fmt.Errorf("status of an instance %s was answered %s, not NotFound", absent.what, said(result))
		}
	}

	return nil
}

func checkStatusSeveral(ctx context.Context, s *suite) error {
	if _, err := s.status(ctx, s.newMachine()); err != nil { // it may not bind the driver
		return err
	}
	if s.cfg.Cloud.Duplicate == nil {
		return skipf("needs a second instance of a machine, which no driver makes (Config.Cloud.Duplicate)")
	}
	m, _, _, err := s.first(ctx)
	if err != nil {
		return err
	}
	if err := s.cfg.Cloud.Duplicate(ctx, m.Machine); err != nil {
		return err
	}
	if err := s.settled(ctx); err != nil {
		return err
	}
	result, err := s.status(ctx, m)
	if err == nil && result.GetStatus().GetCode() != driverv1.Code_CODE_OUT_OF_RANGE {
		err = fmt.Errorf("status of a machine with two instances was answered %s, not OutOfRange", said(result))
	}

	return err
}

func checkStatusUninitialized(ctx context.Context, s *suite) error {
	if err := s.has(driverv1.Operation_OPERATION_INITIALIZE); err != nil {
		return err
	}
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	m.ProviderId = providerID
	before, err := s.status(ctx, m)
	if err != nil {
		return err
	}
	if err := s.initialize(ctx, m); err != nil {
		return err
	}
	if code := before.GetStatus().GetCode(); code != driverv1.Code_CODE_UNINITIALIZED {
		return fmt.Errorf("status before initialize was answered %s, not Uninitialized", said(before))
	}
	if id := before.GetInstanceStatus().GetInstance().GetProviderId(); id != providerID {
		return fmt.Errorf("answer Uninitialized came with instance %q, not %q", id, providerID)
	}
	after, err := s.status(ctx, m)
	if err == nil && after.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		err = fmt.Errorf("status after initialize was answered %s", said(after))
	}

	return err
}

func checkListChangesNothing(ctx context.Context, s *suite) error {
	return s.unchanged(ctx, func() error {
		_, err := s.list(ctx)

		return err
	})
}

func checkListContains(ctx context.Context, s *suite) error {
	made := map[string]*machine{}
	for range s.cfg.Repeat {
		m, _, providerID, err := s.first(ctx)
		if err != nil {
			return err
		}
		made[providerID] = m
	}
	if len(made) != s.cfg.Repeat {
		return fmt.Errorf("%d machines were given %d instances", s.cfg.Repeat, len(made))
	}
	for _, providerID := range slices.Sorted(maps.Keys(made)) {
		if err := s.one(ctx, made[providerID], providerID); err != nil {
			return err
		}
	}

	return nil
}

func checkListForeign(ctx context.Context, s *suite) error {
	if s.cfg.OtherCluster == "" {
		return skipf("needs a driver that serves a second control plane (Config.OtherCluster, --other-cluster)")
	}
	_, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	other := "mcm.v1." + s.cfg.OtherCluster + "."
	subject := strings.Replace(s.subject("list", s.cfg.Class.Name), s.below(""), other, 1)
	x, err := s.send(request{
		subject: subject, env: s.envelope("read-"+nuid.Next(), s.listBody()),
		reply: other + "reply." + s.cfg.Provider + ".conformance." + nuid.Next(),
	})
	if err != nil {
		return err
	}
	result, err := x.result(ctx, s.late())
	if err == nil && result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		err = fmt.Errorf("list failed: %s", said(result))
	}
	if err != nil {
		return fmt.Errorf("control plane %s: %w", s.cfg.OtherCluster, err)
	}
	for _, i := range result.GetList().GetInstances() {
		if i.GetProviderId() == providerID {
			return fmt.Errorf("the list of control plane %s holds %s, which is of %s", s.cfg.OtherCluster, providerID, s.cfg.Cluster)
		}
	}

	return nil
}

func checkVolumeIDs(ctx context.Context, s *suite) error {
	if err := s.has(driverv1.Operation_OPERATION_VOLUME_IDS); err != nil {
		return err
	}
	result, err := s.read(ctx, s.cfg.Class.Name, &driverv1.Envelope{Body: &driverv1.Envelope_VolumeIds{
		VolumeIds: &driverv1.VolumeIDsRequest{Volumes: []*driverv1.PersistentVolume{
			{Name: "csi", Spec: []byte(`{"csi":{"driver":"conformance.example.com","volumeHandle":"not-yours"}}`)},
			{Name: "nfs", Spec: []byte(`{"nfs":{"server":"nfs.example.com","path":"/not-yours"}}`)},
		}},
	}})
	switch {
	case err != nil:
		return err
	case s.plain && result.GetStatus().GetCode() == driverv1.Code_CODE_UNIMPLEMENTED:
		return unboundf("the driver does not implement volumeids")
	case result.GetStatus().GetCode() != driverv1.Code_CODE_OK:
		return fmt.Errorf("volumes of other providers were answered %s", said(result))
	case len(result.GetVolumeIds().GetVolumeIds()) > 0:
		return fmt.Errorf("volumes of other providers were given ids: %q", result.GetVolumeIds().GetVolumeIds())
	default:
		return nil
	}
}

// validate asks whether the class could be used.
func (s *suite) validate(ctx context.Context) (*driverv1.Result, error) {
	if err := s.has(driverv1.Operation_OPERATION_VALIDATE); err != nil {
		return nil, err
	}
	result, err := s.read(ctx, s.cfg.Class.Name, &driverv1.Envelope{
		Body: &driverv1.Envelope_Validate{Validate: &driverv1.ValidateRequest{Class: s.fetches.refs()}},
	})
	if err == nil && s.plain && result.GetStatus().GetCode() == driverv1.Code_CODE_UNIMPLEMENTED {
		err = unboundf("the driver does not implement validate")
	}

	return result, err
}

func checkValidate(ctx context.Context, s *suite) error {
	return s.unchanged(ctx, func() error {
		result, err := s.validate(ctx)
		if err == nil && result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
			err = fmt.Errorf("the class, which instances are made from, was found faulty: %s", said(result))
		}

		return err
	})
}

// checkFaultyField puts something of another type into a field of the
// providerSpec.
func checkFaultyField(ctx context.Context, s *suite) error {
	var spec map[string]any
	if json.Unmarshal(s.cfg.Class.ProviderSpec, &spec) != nil {
		return skipf("the class's providerSpec is no object")
	}
	field := ""
	for _, name := range slices.Sorted(maps.Keys(spec)) {
		if _, ok := spec[name].(string); ok && name != "kind" && name != "apiVersion" {
			field = name

			break
		}
	}
	if field == "" {
		return skipf("the class's providerSpec has no text field to put something else into")
	}
	spec[field] = map[string]any{"conformance": true}
	faulty, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("faulty providerSpec: %w", err)
	}
	defer s.fetches.alter(func(f *fetches) { f.spec = faulty })()
	fetched := s.fetches.count(whatClass)
	result, err := s.validate(ctx)
	switch {
	case err != nil:
		return err
	case s.fetches.count(whatClass) == fetched:
		return skipf("the driver does not ask for the class")
	case result.GetStatus().GetCode() != driverv1.Code_CODE_INVALID_ARGUMENT:
		return fmt.Errorf("an object in field %s was answered %s, not InvalidArgument", field, said(result))
	case !strings.Contains(result.GetStatus().GetMessage(), field):
		return fmt.Errorf("the text does not name the faulty field %s: %s", field, said(result))
	default:
		return nil
	}
}

func checkMigrateClass(ctx context.Context, s *suite) error {
	if err := s.has(driverv1.Operation_OPERATION_MIGRATE_CLASS); err != nil {
		return err
	}

	return s.unchanged(ctx, func() error {
		result, err := s.read(ctx, s.cfg.Class.Name, &driverv1.Envelope{Body: &driverv1.Envelope_MigrateClass{
			MigrateClass: &driverv1.MigrateClassRequest{
				Kind: "ConformanceMachineClass", ApiVersion: "conformance.example.com/v1", Object: []byte(`{}`),
			},
		}})
		switch {
		case err != nil:
			return err
		case s.plain && result.GetStatus().GetCode() == driverv1.Code_CODE_UNIMPLEMENTED:
			return unboundf("the driver does not implement migrateclass")
		case result.GetStatus().GetCode() == driverv1.Code_CODE_OK:
			return fmt.Errorf("a class of a kind that nobody knows was migrated (%s)", bus.CodeName(driverv1.Code_CODE_OK))
		default:
			return nil
		}
	})
}
