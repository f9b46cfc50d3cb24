package drivertest

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nuid"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// do does any operation.
func (r *replica) do(cluster string, env *driverv1.Envelope, o *op) *driverv1.Result {
	if ref := bus.ClassOf(env); ref != nil && (env.GetList() == nil || !r.listsWithout(cluster)) {
		if refusal := r.checkClass(cluster, ref); refusal != nil {
			return refusal
		}
	}
	switch body := env.GetBody().(type) {
	case *driverv1.Envelope_Create:
		return r.create(body.Create.GetMachine(), o)
	case *driverv1.Envelope_Initialize:
		return r.initialize(body.Initialize.GetMachine(), o)
	case *driverv1.Envelope_Delete:
		return r.remove(body.Delete.GetMachine(), o)
	case *driverv1.Envelope_Status:
		return r.status(cluster, body.Status.GetMachine())
	case *driverv1.Envelope_List:
		return r.list(cluster)
	case *driverv1.Envelope_VolumeIds:
		return r.volumeIDs(body.VolumeIds)
	case *driverv1.Envelope_Validate:
		if r.fault == "VALIDATE-1" {
			r.cloud.make(cluster, &driverv1.Machine{Name: "trial", Uid: nuid.Next()}, "")
		}

		return &driverv1.Result{Payload: &driverv1.Result_Validate{Validate: &driverv1.ValidateResponse{}}}
	case *driverv1.Envelope_MigrateClass:
		return r.migrateClass(cluster, body.MigrateClass)
	case *driverv1.Envelope_NodeGroups:
		if r.fault == "GROUP-11" {
			return r.doGroup(env)
		}

		return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, "that belongs below nodegroup")
	default:
		if r.fault == "ENV-4" {
			return resultOf(driverv1.Code_CODE_INTERNAL, "what is that?")
		}

		return resultOf(driverv1.Code_CODE_UNIMPLEMENTED, "not here")
	}
}

// listsWithout reports whether it lists by no class, or by one that may be old.
func (r *replica) listsWithout(cluster string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.sees || r.fault == "REF-1/list" && r.cacheOf(cluster).class != nil
}

// checkClass fetches a class and its secret, and finds fault with them.
func (r *replica) checkClass(cluster string, ref *driverv1.ClassReference) *driverv1.Result {
	class, secret, err := r.fetch(cluster, ref)
	if err != nil {
		if r.fault == "DELETE-3/unasked" {
			return resultOf(driverv1.Code_CODE_OK, "")
		}

		return r.refusedFetch(bus.StatusOf(err))
	}
	if token := string(secret.GetData()["token"]); ref.GetSecret() != nil && token != testToken {
		text := "the cloud does not take the token"
		if r.fault == "STATUSTEXT-1" {
			text += " " + token
		}

		return resultOf(driverv1.Code_CODE_UNAUTHENTICATED, text)
	}
	if !strings.Contains(string(class.GetProviderSpec()), "conformance") {
		return nil
	}
	if r.fault == "VALIDATE-2" {
		return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, "something is wrong")
	}

	return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, "size: want text")
}

// refusedFetch is the end of an operation for which something was refused.
func (r *replica) refusedFetch(st *driverv1.Status) *driverv1.Result {
	what, some := strings.CutPrefix(string(r.fault), "FETCH-5/")
	told := r.fault == "FETCH-5" || some && strings.HasSuffix(st.GetMessage(), what)
	switch st.GetCode() {
	case driverv1.Code_CODE_NOT_FOUND, driverv1.Code_CODE_OUT_OF_RANGE, driverv1.Code_CODE_UNINITIALIZED:
		if !told {
			st.Code = driverv1.Code_CODE_FAILED_PRECONDITION // it is no word on an instance
		}
	default:
	}

	return &driverv1.Result{Status: st}
}

func everything(*instance) bool { return true }

func (r *replica) create(m *driverv1.Machine, o *op) *driverv1.Result {
	created := func(i *driverv1.Instance) *driverv1.Result {
		response := &driverv1.CreateResponse{Instance: i}
		if r.fault == "MACHINE-2" {
			response.LastKnownState = testToken
		}

		return &driverv1.Result{Payload: &driverv1.Result_Create{Create: response}}
	}
	uniqueName := r.identity == driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME
	refused := false
	for _, i := range r.cloud.find(o.cluster, everything) {
		taken := i.GetMachineName() == m.GetName() && uniqueName
		switch {
		case i.GetMachineUid() == m.GetUid() && r.fault != "CREATE-1" && r.fault != "ENV-9",
			taken && r.fault == "CREATE-2":
			return created(i)
		case taken && i.GetMachineUid() != m.GetUid() && r.fault != "IDENTITY-2":
			refused = true
		}
	}
	if err := r.fetchBootstrap(o, m); err != nil {
		return r.refusedFetch(bus.StatusOf(err))
	}
	r.tell(o)
	if !r.begin(o) {
		return r.keptFromBeginning()
	}
	if refused { // by the cloud, once it was asked
		return resultOf(driverv1.Code_CODE_ALREADY_EXISTS, "the name is taken")
	}
	if r.cuts {
		r.cloud.makeLate(func() { r.cloud.makeFor(o.env.GetOwner(), o.cluster, m, "") })

		return unknown(resultOf(driverv1.Code_CODE_DEADLINE_EXCEEDED, "the cloud has not answered"))
	}
	defer r.cloud.arrive(m.GetName())()
	if r.fault == "FENCE-3" && !r.begin(o) {
		return unknown(resultOf(driverv1.Code_CODE_ABORTED, "cut off"))
	}
	token := ""
	if r.identity == driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN {
		token = o.env.GetOperationId()
		if r.fault == "IDENTITY-1" {
			token = nuid.Next()
		}
	}

	if r.fault == "OWNER-1" {
		return created(r.cloud.make(o.cluster, m, token))
	}

	return created(r.cloud.makeFor(o.env.GetOwner(), o.cluster, m, token))
}

// keptFromBeginning is the end of an operation that must not begin.
func (r *replica) keptFromBeginning() *driverv1.Result {
	result := resultOf(driverv1.Code_CODE_ABORTED, "fenced")
	result.OutcomeUnknown, result.NoEffect = r.fault != "RESULT-3/fenced", r.fault != "RESULT-3/fenced" && r.fault != "RESULT-6/fenced"

	return result
}

// ofMachine finds a machine's instances; one without a uid goes by its name.
func ofMachine(m *driverv1.Machine) func(*instance) bool {
	return func(i *instance) bool {
		return i.GetMachineUid() == m.GetUid() || i.GetMachineUid() == "" && i.GetMachineName() == m.GetName()
	}
}

func (r *replica) initialize(m *driverv1.Machine, o *op) *driverv1.Result {
	found := r.cloud.find(o.cluster, ofMachine(m))
	if len(found) == 0 {
		return resultOf(driverv1.Code_CODE_NOT_FOUND, "no such instance")
	}
	if !r.begin(o) {
		return r.keptFromBeginning()
	}
	if r.cloud.initialize(found[0].GetProviderId()) && r.fault == "INITIALIZE-1" {
		return resultOf(driverv1.Code_CODE_FAILED_PRECONDITION, "it is initialized already")
	}

	return &driverv1.Result{Payload: &driverv1.Result_Initialize{Initialize: &driverv1.InitializeResponse{Instance: found[0]}}}
}

func (r *replica) remove(m *driverv1.Machine, o *op) *driverv1.Result {
	if r.cloud.down.Load() {
		return resultOf(driverv1.Code_CODE_UNAVAILABLE, "connection refused")
	}
	found := r.cloud.find(o.cluster, func(i *instance) bool {
		return i.GetMachineUid() == m.GetUid() && r.fault != "DELETE-2" ||
			i.GetProviderId() == m.GetProviderId() && r.fault != "DELETE-2/id"
	})
	for _, i := range found {
		if !r.begin(o) {
			return r.keptFromBeginning()
		}
		if r.fault != "DELETE-3" {
			r.cloud.remove(i.GetProviderId())
		}
	}
	r.cloud.hasDeleted()
	if len(found) == 0 && r.fault == "DELETE-1" {
		return resultOf(driverv1.Code_CODE_NOT_FOUND, "no such instance")
	}

	return &driverv1.Result{Payload: &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{}}}
}

func (r *replica) status(cluster string, m *driverv1.Machine) *driverv1.Result {
	found := r.cloud.find(cluster, ofMachine(m))
	initialized := r.cloud.find(cluster, func(i *instance) bool { return i.initialized && ofMachine(m)(i) })
	result := &driverv1.Result{}
	switch {
	case len(found) == 0 && r.fault == "STATUS-2":
		return resultOf(driverv1.Code_CODE_UNKNOWN, "no such instance")
	case len(found) == 0:
		if r.fault == "STATUS-1" {
			r.cloud.make(cluster, m, "")
		}

		return resultOf(driverv1.Code_CODE_NOT_FOUND, "no such instance")
	case len(found) > 1 && r.fault != "STATUS-3":
		return resultOf(driverv1.Code_CODE_OUT_OF_RANGE, "several instances")
	case len(initialized) == 0 && r.fault != "STATUS-4":
		result = resultOf(driverv1.Code_CODE_UNINITIALIZED, "not initialized")
	}
	result.Payload = &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{Instance: found[0]}}

	return result
}

func (r *replica) list(cluster string) *driverv1.Result {
	if r.away || r.cloud.down.Load() {
		return resultOf(driverv1.Code_CODE_UNAVAILABLE, "connection refused")
	}
	all := r.cloud.find(cluster, everything)
	r.cloud.hasListed()
	switch r.fault {
	case "LIST-1":
		for _, i := range all {
			r.cloud.remove(i.GetProviderId())
		}
	case "LIST-2":
		if len(all) > 0 {
			all = all[1:]
		}
	case "LIST-3":
		all = slices.Concat(r.cloud.find("default", everything), r.cloud.find(otherCluster, everything))
	}

	return &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{Instances: all}}}
}

func (r *replica) volumeIDs(req *driverv1.VolumeIDsRequest) *driverv1.Result {
	response := &driverv1.VolumeIDsResponse{}
	for _, v := range req.GetVolumes() {
		var spec struct {
			CSI struct {
				Driver       string `json:"driver"`
				VolumeHandle string `json:"volumeHandle"`
			} `json:"csi"`
		}
		if err := json.Unmarshal(v.GetSpec(), &spec); err != nil {
			return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, err.Error())
		}
		if spec.CSI.Driver == "csi.acme.example.com" || r.fault == "VOLUMEIDS-1" && spec.CSI.VolumeHandle != "" {
			response.VolumeIds = append(response.VolumeIds, spec.CSI.VolumeHandle)
		}
	}

	return &driverv1.Result{Payload: &driverv1.Result_VolumeIds{VolumeIds: response}}
}

func (r *replica) migrateClass(cluster string, req *driverv1.MigrateClassRequest) *driverv1.Result {
	if r.fault == "MIGRATECLASS-1" {
		r.cloud.make(cluster, &driverv1.Machine{Name: "migrated", Uid: nuid.Next()}, "")
	}
	if req.GetKind() != "AcmeMachineClass" {
		return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, fmt.Sprintf("kind %s: want AcmeMachineClass", req.GetKind()))
	}

	return &driverv1.Result{Payload: &driverv1.Result_MigrateClass{
		MigrateClass: &driverv1.MigrateClassResponse{MachineClass: req.GetObject()},
	}}
}
