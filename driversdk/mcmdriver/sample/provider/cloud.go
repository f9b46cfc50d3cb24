package provider

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	"github.com/gardener/machine-controller-manager/pkg/apis/machine/v1alpha1"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/codes"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/status"
	corev1 "k8s.io/api/core/v1"
)

// A cloud is one virtual cloud, over its HTTP API.
type cloud struct{ endpoint, token string }

type instance struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	ProviderID  string `json:"providerID"`
	NodeName    string `json:"nodeName"`
	Initialized bool   `json:"initialized"`
	Addresses   []struct {
		Type    string `json:"type"`
		Address string `json:"address"`
	} `json:"addresses"`
}

func (i instance) addresses() []corev1.NodeAddress {
	var all []corev1.NodeAddress
	for _, a := range i.Addresses {
		all = append(all, corev1.NodeAddress{Type: corev1.NodeAddressType(a.Type), Address: a.Address})
	}

	return all
}

type creation struct {
	Name        string            `json:"name"`
	MachineType string            `json:"machineType"`
	Region      string            `json:"region"`
	Zone        string            `json:"zone,omitempty"`
	Tags        map[string]string `json:"tags"`
	UserData    []byte            `json:"userData,omitempty"`
	Identity    string            `json:"identity"`
}

func (c *cloud) create(ctx context.Context, req creation) (*instance, error) {
	made := &instance{}

	return made, c.call(ctx, http.MethodPost, "/v1/instances", req, made)
}

func (c *cloud) remove(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/v1/instances/"+url.PathEscape(id), nil, &instance{})
}

func (c *cloud) initialize(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodPost, "/v1/instances/"+url.PathEscape(id)+"/initialize", nil, &instance{})
}

// list returns the instances of the class's cluster.
func (c *cloud) list(ctx context.Context, spec *providerSpec) ([]instance, error) {
	key, value := spec.cluster()
	var all struct {
		Instances []instance `json:"instances"`
	}

	return all.Instances, c.call(ctx, http.MethodGet, "/v1/instances?"+url.Values{"tag": {key + "=" + value}}.Encode(), nil, &all)
}

// of returns the instances of a machine: the one with its provider id, else all with its name.
func (c *cloud) of(ctx context.Context, m *v1alpha1.Machine, spec *providerSpec) ([]instance, error) {
	all, err := c.list(ctx, spec)
	if err != nil {
		return nil, err
	}

	return slices.DeleteFunc(all, func(i instance) bool {
		if m.Spec.ProviderID != "" {
			return i.ProviderID != m.Spec.ProviderID
		}

		return i.Name != m.Name
	}), nil
}

// find returns the one instance of a machine.
func (c *cloud) find(ctx context.Context, m *v1alpha1.Machine, spec *providerSpec) (*instance, error) {
	found, err := c.of(ctx, m, spec)
	switch {
	case err != nil:
		return nil, err
	case len(found) == 0:
		return nil, status.Error(codes.NotFound, "no instance of machine "+m.Name)
	case len(found) > 1:
		return nil, status.Error(codes.OutOfRange, fmt.Sprintf("%d instances of machine %s", len(found), m.Name))
	default:
		return &found[0], nil
	}
}

// call sends in as JSON unless it is nil, and decodes the answer into out.
func (c *cloud) call(ctx context.Context, method, path string, in, out any) error {
	body := &bytes.Buffer{}
	if in != nil {
		if err := json.NewEncoder(body).Encode(in); err != nil {
			return status.Error(codes.Internal, err.Error())
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, c.endpoint+path, body)
	if err != nil {
		return status.Error(codes.InvalidArgument, "providerSpec: endpoint is not a URL")
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+c.token)
	answer, err := http.DefaultClient.Do(req)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	case err != nil:
		return status.Error(codes.Unavailable, err.Error())
	}
	defer answer.Body.Close()
	if answer.StatusCode >= http.StatusMultipleChoices {
		return refusal(answer)
	}
	if err := json.NewDecoder(answer.Body).Decode(out); err != nil {
		return status.Error(codes.Internal, "the cloud's answer: "+err.Error())
	}

	return nil
}

// refusal turns an error of the cloud into one of the machine controller manager's.
func refusal(answer *http.Response) error {
	var said struct {
		Error struct {
			Code    string `json:"code"`
			Message string `json:"message"`
		} `json:"error"`
	}
	if err := json.NewDecoder(answer.Body).Decode(&said); err != nil {
		return status.Error(codes.Unavailable, answer.Status)
	}
	code := codes.Internal
	switch said.Error.Code {
	case "InvalidArgument":
		code = codes.InvalidArgument
	case "Unauthorized":
		code = codes.Unauthenticated
	case "QuotaExceeded":
		code = codes.ResourceExhausted
	case "NotFound":
		code = codes.NotFound
	case "RateLimited", "Unavailable":
		code = codes.Unavailable
	case "Conflict":
		code = codes.Aborted
	}

	return status.Error(code, said.Error.Message)
}

// codeOf returns the code of an error of [cloud.call].
func codeOf(err error) codes.Code {
	said, _ := status.FromError(err)

	return said.Code()
}
