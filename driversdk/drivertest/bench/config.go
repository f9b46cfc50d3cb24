package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Config says which driver to look at and what it is to be given.
type Config struct {
	// NATS is the bus that the driver is on, or will be.
	NATS bus.Config
	// Provider is what the driver serves.
	Provider string
	// Cluster is the control plane to play; empty means "default".
	Cluster string
	// Key is the control plane's own; nil means one of this check's.
	Key *bus.SealKey
	// OtherCluster is a second control plane that the driver serves, to see that
	// it keeps them apart; empty for none.
	OtherCluster string
	// NodeGroup is a node group of the driver's cloud, for a driver that serves
	// them: it is resized, and instances that it gets meanwhile are deleted again. No
	// other group is touched. Empty for none.
	NodeGroup string
	// OtherNodeGroup is a second one, to see that the driver keeps them apart. It is
	// resized only if it has no instance.
	OtherNodeGroup string
	// Class is the class of the instances that are made.
	Class Class
	// Secrets are those that Class refers to.
	Secrets []Secret
	// Bootstrap are the values that replace placeholders in user data.
	Bootstrap map[string]string
	// Timeout is how long one operation may take; 0 means a minute.
	Timeout time.Duration
	// Wait is how long to wait for the driver to come to the bus; 0 means 30 seconds.
	Wait time.Duration
	// Patience bounds waits for what is to come at once, or within a second; 0 means
	// 10 seconds, which is far above what the contract asks for, because machines
	// that run tests stall.
	Patience time.Duration
	// LateInstance is how long an instance may take to appear in the list after its
	// create was cut off, beyond the driver's settle time; 0 means 5 seconds. The suite
	// waits for that long at its end, if the outcome of a create is unknown.
	LateInstance time.Duration
	// Repeat is how often what has to be idempotent is repeated; 0 means 3.
	Repeat int
	// Only are the ids of the clauses to check; none means all.
	Only []string
	// Strict: a clause that binds the driver, and could not be checked, fails, unless
	// MaySkip has its id.
	Strict  bool
	MaySkip []string
	// Except are clauses that the driver is known to break. They do not fail the run.
	Except []Exception
	// Cloud lends a look at what the bus does not show.
	Cloud Cloud
	// Process lets the driver be stopped and started; nil when that is not ours to
	// do.
	Process Process
	// Logger receives what the suite's own connection has to say; nil means
	// nothing is logged.
	Logger *slog.Logger
}

// An Exception is a clause that the driver cannot keep. All fields are needed.
type Exception struct {
	// Clause is its id, such as "CREATE-2".
	Clause string `json:"clause"`
	// Why says why the driver cannot keep it.
	Why string `json:"why"`
	// Cost says what that means for the operator.
	Cost string `json:"cost"`
}

// A Class is a MachineClass as far as drivers see it.
type Class struct {
	Namespace, Name string
	// ProviderSpec is JSON.
	ProviderSpec         json.RawMessage
	Labels, Annotations  map[string]string
	SecretRef            Reference
	CredentialsSecretRef Reference
}

// A Reference names a Secret; the zero value names none.
type Reference struct{ Namespace, Name string }

// A Secret is what a Kubernetes Secret holds.
type Secret struct {
	Namespace, Name string
	Data            map[string][]byte
}

// A Cloud is what the suite may ask of the driver's cloud. All functions are
// optional.
type Cloud struct {
	// Hold makes the creation of a machine's instance wait at the cloud, with the
	// request taken and not answered, until release is called. Held waits until
	// such a request is there.
	Hold func(ctx context.Context, machine string) (release func(), err error)
	Held func(ctx context.Context, machine string) error
	// Duplicate makes a second instance of a machine, as a faulty driver would have.
	Duplicate func(ctx context.Context, m *driverv1.Machine) error
	// Tokens returns the idempotency tokens of the creations that the cloud was
	// asked for, of the instance of a machine's name.
	Tokens func(ctx context.Context, machine string) ([]string, error)
}

// A Process is one running replica of the driver.
type Process interface {
	// Stop asks it to end, as SIGTERM does, and does not wait.
	Stop(ctx context.Context) error
	// Wait returns when it has ended.
	Wait(ctx context.Context) error
	// Start starts it again.
	Start(ctx context.Context) error
}

// Complete sets defaults, and returns an error that names all that is wrong.
func (c Config) Complete() (Config, error) {
	c.Cluster = cmp.Or(c.Cluster, "default")
	c.Timeout = cmp.Or(c.Timeout, time.Minute)
	c.Wait = cmp.Or(c.Wait, 30*time.Second)
	c.Patience = cmp.Or(c.Patience, 10*time.Second)
	c.LateInstance = cmp.Or(c.LateInstance, 5*time.Second)
	c.Repeat = cmp.Or(c.Repeat, 3)
	c.Logger = cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
	errs := []error{bus.ValidToken("provider", c.Provider), bus.ValidToken("cluster", c.Cluster)}
	if c.OtherCluster != "" {
		errs = append(errs, bus.ValidToken("other cluster", c.OtherCluster))
	}
	for what, is := range map[string]bool{
		"the other node group must differ from the node group, which it needs":   c.OtherNodeGroup != "" && (c.NodeGroup == "" || c.NodeGroup == c.OtherNodeGroup),
		"timeout, wait, patience, late instance and repeat must not be negative": min(c.Timeout, c.Wait, c.Patience, c.LateInstance, time.Duration(c.Repeat)) < 0,
		"the class needs a namespace and a name":                                 c.Class.Namespace == "" || c.Class.Name == "",
		"the class's providerSpec is no JSON":                                    len(c.Class.ProviderSpec) > 0 && !json.Valid(c.Class.ProviderSpec),
	} {
		if is {
			errs = append(errs, errors.New(what))
		}
	}
	for _, ref := range []Reference{c.Class.SecretRef, c.Class.CredentialsSecretRef} {
		if ref.Name != "" && c.secretOf(ref) == nil {
			errs = append(errs, fmt.Errorf("the class refers to secret %s/%s, which was not given", ref.Namespace, ref.Name))
		}
	}

	return c, errors.Join(errs...)
}

func (c Config) secretOf(ref Reference) *Secret {
	for n := range c.Secrets {
		if s := &c.Secrets[n]; s.Namespace == ref.Namespace && s.Name == ref.Name {
			return s
		}
	}

	return nil
}
