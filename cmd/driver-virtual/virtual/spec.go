package virtual

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// A Spec is the providerSpec of a MachineClass.
type Spec struct {
	// Endpoint is the URL of the cloud, as the driver reaches it.
	Endpoint    string `json:"endpoint"`
	MachineType string `json:"machineType"`
	Region      string `json:"region"`
	// Zone may be empty: the cloud then has none.
	Zone string `json:"zone,omitempty"`
	// Tags are added to instances. Keys of the driver's own begin with "machinebus.io/".
	Tags map[string]string `json:"tags,omitempty"`
}

// Validate returns an error that names all invalid fields.
func (s *Spec) Validate() error {
	var errs []error
	if u, err := url.Parse(s.Endpoint); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		// Not the value: it may hold a password.
		errs = append(errs, errors.New("endpoint: want a URL such as http://127.0.0.1:8080"))
	}
	if s.MachineType == "" {
		errs = append(errs, errors.New("machineType is missing"))
	}
	if s.Region == "" || strings.Contains(s.Region, "/") {
		errs = append(errs, fmt.Errorf("region: want a name without slashes, have %q", s.Region))
	}
	for key := range s.Tags {
		if strings.HasPrefix(key, tagPrefix) {
			errs = append(errs, fmt.Errorf("tags: %q: keys that begin with %s are reserved for the driver", key, tagPrefix))
		}
	}

	return errors.Join(errs...)
}
