package cloudapi

import "time"

// TagMachineUID is the tag in which drivers record the uid of the machine that
// an instance is for. The cloud counts duplicates by it.
const TagMachineUID = "machinebus.io/machine-uid"

// A State is a stage in an instance's life, in this order.
type State string

const (
	StatePending  State = "pending"  // exists and boots
	StateRunning  State = "running"  // has booted
	StateDeleting State = "deleting" // is switched off for good, and still listed
	StateGone     State = "gone"     // only in the answer to its deletion
)

// An Identity is how the cloud recognizes a repeated create.
type Identity string

const (
	// IdentityToken returns the same instance for the same idempotency token. For 24 hours
	// after the instance's deletion the token is refused.
	IdentityToken Identity = "token"
	// IdentityUniqueName refuses a second live instance of one name.
	IdentityUniqueName Identity = "unique_name"
	// IdentityNone creates an instance for every create.
	IdentityNone Identity = "none"
)

// An Instance is one machine of the cloud.
type Instance struct {
	ID          string            `json:"id"` // "i-" and hexadecimal digits
	Name        string            `json:"name"`
	MachineType string            `json:"machineType"`
	Region      string            `json:"region"`
	Zone        string            `json:"zone,omitempty"`
	Tags        map[string]string `json:"tags,omitempty"`
	// UserDataSHA256 is the hexadecimal checksum of the user data, which is not stored.
	UserDataSHA256 string    `json:"userDataSHA256"`
	State          State     `json:"state"`
	Initialized    bool      `json:"initialized"`
	CreatedAt      time.Time `json:"createdAt"`
	// NodeName is the name under which the instance joins a cluster.
	NodeName   string    `json:"nodeName"`
	ProviderID string    `json:"providerID"` // "virtual:///<region>/<id>"
	Addresses  []Address `json:"addresses,omitempty"`
}

// An Address is one way to reach an instance. Type is a Kubernetes
// NodeAddressType, such as InternalIP.
type Address struct {
	Type    string `json:"type"`
	Address string `json:"address"`
}

// A CreateRequest describes the instance to create. Name, MachineType and Region are
// required.
type CreateRequest struct {
	Name        string            `json:"name"`
	MachineType string            `json:"machineType"`
	Region      string            `json:"region"`
	Zone        string            `json:"zone,omitempty"`
	Tags        map[string]string `json:"tags,omitempty"`
	UserData    []byte            `json:"userData,omitempty"` // at most 1 MiB
	// IdempotencyToken is required if Identity is "token", and otherwise only logged. It is
	// not a secret. A repeated create must have the same name, machine type, region and
	// zone.
	IdempotencyToken string `json:"idempotencyToken,omitempty"`
	// Identity overrides the cloud's default for this create.
	Identity Identity `json:"identity,omitempty"`
}

// A Filter chooses instances; the zero value chooses all.
type Filter struct {
	Name string
	// Tags must all be present with these values.
	Tags map[string]string
}

// An InstanceList is the answer to a list, oldest instance first.
type InstanceList struct {
	Instances []Instance `json:"instances"`
}

// The operations of the API in fault rules, statistics and the log.
const (
	OpCreate     = "create"
	OpGet        = "get"
	OpList       = "list"
	OpDelete     = "delete"
	OpInitialize = "initialize"
)
