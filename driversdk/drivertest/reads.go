package drivertest

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var readClauses = []Clause{
	{ID: "STATUS-1", Says: "Status changes nothing", check: checkStatusChangesNothing},
	{ID: "STATUS-2", Says: "Status of an absent instance is NotFound", check: checkStatusAbsent},
	{ID: "STATUS-3", Says: "Status of several instances is OutOfRange", check: checkStatusSeveral},
	{ID: "STATUS-4", Says: "Status of an instance that is not initialized is Uninitialized", check: checkStatusUninitialized},
	{ID: "LIST-1", Says: "List changes nothing", check: func(c *check) { c.unchanged(func() { c.List() }) }},
	{ID: "LIST-2", Says: "List contains what was made", check: checkListContains},
	{ID: "LIST-3", Says: "List contains nothing of other control planes", check: checkListForeign},
	{ID: "VOLUMEIDS-1", Says: "volumes of other providers are left out", check: checkVolumeIDs},
	{ID: "VALIDATE-1", Says: "Validate changes nothing", check: checkValidate},
	{ID: "VALIDATE-2", Says: "a faulty field is InvalidArgument and named", check: checkFaultyField},
	{ID: "MIGRATECLASS-1", Says: "MigrateClass changes nothing", check: checkMigrateClass},
}

// unchanged fails if do changes what list shows.
func (c *check) unchanged(do func()) {
	m := c.first()
	m.One(m.providerID)
	before := c.listedIDs()
	for range c.Repeat {
		do()
	}
	if after := c.listedIDs(); !slices.Equal(before, after) {
		c.Failf("list shows %q, where it showed %q before", after, before)
	}
	m.One(m.providerID)
}

// listedIDs returns the provider ids of all instances of the class, once the list has settled.
func (c *check) listedIDs() (ids []string) {
	c.Settle()
	for _, i := range c.List() {
		ids = append(ids, i.GetProviderId())
	}
	slices.Sort(ids)

	return ids
}

func checkStatusChangesNothing(c *check) {
	absent := c.NewMachine()
	c.unchanged(func() { absent.Status() })
	absent.None("it was only asked for its status")
}

func checkStatusAbsent(c *check) {
	m := c.first()
	m.Remove()
	m.Gone()
	byID := c.NewMachine()
	byID.Uid, byID.Name, byID.ProviderId = m.GetUid(), m.GetName(), m.providerID
	for what, absent := range map[string]*bench.Machine{
		"that never was": c.NewMachine(), "that was removed": m.Machine, "that was removed, by its provider id": byID,
	} {
		c.Want(driverv1.Code_CODE_NOT_FOUND, "status of an instance "+what, absent.Status())
	}
}

func checkStatusSeveral(c *check) {
	c.NewMachine().Status() // the clause may not bind the driver
	if c.Cloud.Duplicate == nil {
		c.Skipf("needs a second instance of a machine, which no driver makes (Config.Cloud.Duplicate)")
	}
	m := c.first()
	c.Must(c.Cloud.Duplicate(c.Context(), m.Machine.Machine))
	c.Settle()
	c.Want(driverv1.Code_CODE_OUT_OF_RANGE, "status of a machine with two instances", m.Status())
}

func checkStatusUninitialized(c *check) {
	c.Implements(driverv1.Operation_OPERATION_INITIALIZE)
	m := c.firstNamed()
	before := m.Status()
	m.Initialize()
	c.Want(driverv1.Code_CODE_UNINITIALIZED, "status before initialize", before)
	if id := before.GetInstanceStatus().GetInstance().GetProviderId(); id != m.providerID {
		c.Failf("answer Uninitialized came with instance %q, not %q", id, m.providerID)
	}
	c.Want(ok, "status after initialize", m.Status())
}

func checkListContains(c *check) {
	all := map[string]*made{}
	for range c.Repeat {
		m := c.first()
		all[m.providerID] = m
	}
	if len(all) != c.Repeat {
		c.Failf("%d machines were given %d instances", c.Repeat, len(all))
	}
	for providerID, m := range all {
		m.One(providerID)
	}
}

func checkListForeign(c *check) {
	if c.OtherCluster == "" {
		c.Skipf("needs a driver that serves a second control plane (Config.OtherCluster, --other-cluster)")
	}
	m := c.first()
	r, other := c.ListRequest(), "mcm.v1."+c.OtherCluster+"."
	r.Subject = strings.Replace(r.Subject, c.Below(""), other, 1)
	r.Reply = strings.Replace(c.NewReply(), c.Below(""), other, 1)
	result := c.Send(r).Result()
	c.Want(ok, "a list of control plane "+c.OtherCluster, result)
	for _, i := range result.GetList().GetInstances() {
		if i.GetProviderId() == m.providerID {
			c.Failf("the list of control plane %s holds %s, which is of %s", c.OtherCluster, m.providerID, c.Cluster)
		}
	}
}

func checkVolumeIDs(c *check) {
	result := c.Read(&driverv1.Envelope{Body: &driverv1.Envelope_VolumeIds{
		VolumeIds: &driverv1.VolumeIDsRequest{Volumes: []*driverv1.PersistentVolume{
			{Name: "csi", Spec: []byte(`{"csi":{"driver":"conformance.example.com","volumeHandle":"not-yours"}}`)},
			{Name: "nfs", Spec: []byte(`{"nfs":{"server":"nfs.example.com","path":"/not-yours"}}`)},
		}},
	}})
	c.Want(ok, "a request for ids of other providers' volumes", result)
	if ids := result.GetVolumeIds().GetVolumeIds(); len(ids) > 0 {
		c.Failf("volumes of other providers were given ids: %q", ids)
	}
}

// validate asks whether the class could be used.
func validate(c *check) *driverv1.Result {
	return c.Read(&driverv1.Envelope{Body: &driverv1.Envelope_Validate{Validate: &driverv1.ValidateRequest{Class: c.Fetches.Refs()}}})
}

func checkValidate(c *check) {
	c.unchanged(func() { c.Want(ok, "validate of the class, which instances are made from,", validate(c)) })
}

// checkFaultyField puts an object into a text field of the providerSpec.
func checkFaultyField(c *check) {
	var spec map[string]any
	if json.Unmarshal(c.Class.ProviderSpec, &spec) != nil {
		c.Skipf("the class's providerSpec is no object")
	}
	fields := slices.DeleteFunc(slices.Sorted(maps.Keys(spec)), func(name string) bool {
		_, text := spec[name].(string)

		return !text || name == "kind" || name == "apiVersion"
	})
	if len(fields) == 0 {
		c.Skipf("the class's providerSpec has no text field to put an object into")
	}
	field := fields[0]
	spec[field] = map[string]any{"conformance": true}
	faulty, err := json.Marshal(spec)
	c.Must(err)
	fetched := c.Fetches.Count(bench.FetchClass)
	var result *driverv1.Result
	c.Fetches.With(bench.Answers{Spec: faulty}, func() { result = validate(c) })
	if c.Fetches.Count(bench.FetchClass) == fetched {
		c.Skipf("the driver does not ask for the class")
	}
	c.Want(driverv1.Code_CODE_INVALID_ARGUMENT, "an object in field "+field, result)
	if !strings.Contains(result.GetStatus().GetMessage(), field) {
		c.Failf("the text does not name the faulty field %s: %s", field, bench.Said(result))
	}
}

func checkMigrateClass(c *check) {
	c.Implements(driverv1.Operation_OPERATION_MIGRATE_CLASS)
	c.unchanged(func() {
		result := c.Read(&driverv1.Envelope{Body: &driverv1.Envelope_MigrateClass{MigrateClass: &driverv1.MigrateClassRequest{
			Kind: "ConformanceMachineClass", ApiVersion: "conformance.example.com/v1", Object: []byte(`{}`),
		}}})
		if result.GetStatus().GetCode() == ok {
			c.Failf("a class of an unknown kind was migrated (%s)", bench.Said(result))
		}
	})
}
