package external_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/machinebus/machinebus/driversdk/external"
)

// testToken is the secret of the test's cloud.
const testToken = "a-token-that-stays-secret"

// A provider is what one of 2018 looks like: it asks for class and secret in each call, and has a
// cloud, which is a list.
type provider struct {
	MachineClassDataProvider external.MachineClassDataProvider

	cloud *cloud
}

// A cloud outlives its providers, which are called one at a time.
type cloud struct {
	mu        sync.Mutex
	instances map[string]string // machine names by provider id
	userData  map[string]string // by provider id
	revisions []int32
	made      int
	calls     int // that run now
	failure   error
}

func newCloud() *cloud {
	return &cloud{instances: map[string]string{}, userData: map[string]string{}}
}

func newDriver(c *cloud) *external.Driver {
	p := &provider{cloud: c}
	d := external.New(external.ClassType{APIVersion: "machine.sapcloud.io/v1alpha1", Kind: "ShelfMachineClass"}, p)
	p.MachineClassDataProvider = d

	return d
}

// A shelfMachineClass is decoded as the drivers of 2018 did.
type shelfMachineClass struct {
	Kind       string    `json:"kind"`
	APIVersion string    `json:"apiVersion"`
	Metadata   reference `json:"metadata"`
	Spec       struct {
		Size      string     `json:"size"`
		SecretRef *reference `json:"secretRef"`
	} `json:"spec"`
}

type reference struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

type secret struct {
	Data map[string][]byte `json:"data"`
}

func (p *provider) classData(meta *external.MachineClassMeta) (*shelfMachineClass, *secret, error) {
	text, err := p.MachineClassDataProvider.GetMachineClass(meta)
	if err != nil {
		return nil, nil, err
	}
	class, s := &shelfMachineClass{}, &secret{}
	if err := json.Unmarshal([]byte(text.(string)), class); err != nil {
		return nil, nil, err
	}
	data, err := p.MachineClassDataProvider.GetSecret(&external.SecretMeta{
		SecretName: class.Spec.SecretRef.Name, SecretNameSpace: class.Spec.SecretRef.Namespace, Revision: 1,
	})
	if err != nil {
		return nil, nil, err
	}
	if err := json.Unmarshal([]byte(data), s); err != nil {
		return nil, nil, err
	}
	if string(s.Data["token"]) != testToken {
		return nil, nil, errors.New("rpc error: code = Unauthenticated desc = the token is not the cloud's")
	}

	return class, s, nil
}

// enter is a call to the cloud. The calls of 2018 never overlap.
func (p *provider) enter() (leave func(), err error) {
	c := p.cloud
	c.mu.Lock()
	c.calls++
	overlap, failure := c.calls > 1, c.failure
	c.mu.Unlock()
	leave = func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.calls--
	}
	if overlap {
		failure = errors.New("two calls at once")
	}

	return leave, failure
}

func (p *provider) Create(meta *external.MachineClassMeta, credentials, machineID, machineName string) (id, node string, err error) {
	leave, err := p.enter()
	defer leave()
	if err != nil {
		return "Error", "Error", err
	}
	class, s, err := p.classData(meta)
	if err != nil {
		return "Error", "Error", err
	}
	if class.Spec.Size == "none" {
		return "Error", "Error", errors.New("machine codes error: code = [ResourceExhausted] message = [no shelf of that size]")
	}
	c := p.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made++
	id = fmt.Sprintf("shelf:///%s/%d", class.Metadata.Namespace, c.made)
	c.instances[id], c.userData[id] = machineName, string(s.Data["userData"])
	c.revisions = append(c.revisions, meta.Revision)

	return id, machineName + ".shelf.internal", nil
}

func (p *provider) Delete(meta *external.MachineClassMeta, credentials, machineID string) error {
	leave, err := p.enter()
	defer leave()
	if err != nil {
		return err
	}
	if _, _, err := p.classData(meta); err != nil {
		return err
	}
	c := p.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.instances[machineID]; !ok {
		return fmt.Errorf("machine codes error: code = [NotFound] message = [no instance %s]", machineID)
	}
	delete(c.instances, machineID)

	return nil
}

func (p *provider) List(meta *external.MachineClassMeta, credentials, machineID string) (map[string]string, error) {
	leave, err := p.enter()
	defer leave()
	if err != nil {
		return nil, err
	}
	if _, _, err := p.classData(meta); err != nil {
		return nil, err
	}
	c := p.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	list := maps.Clone(c.instances)
	list["shelf:///without-a-name"] = ""

	return list, nil
}
