package stack

import (
	"context"
	"crypto/rand"
	"strings"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// A Cloud is one virtual-cloud.
type Cloud struct {
	*Process

	// Admin turns its knobs and reads its log.
	Admin *cloudapi.Admin
	// Endpoint and APIToken are what a driver needs.
	Endpoint, APIToken string
}

// StartCloud starts a cloud whose instances join the cluster of kubeconfig as
// Nodes; with an empty one they join none.
func (s *Site) StartCloud(ctx context.Context, name, kubeconfig string, args ...string) (*Cloud, error) {
	c := &Cloud{APIToken: strings.ToLower(rand.Text())}
	adminToken := strings.ToLower(rand.Text())
	all := []string{"--listen", Loopback(0), "--log", s.path(name + ".jsonl")}
	if kubeconfig != "" {
		all = append(all, "--kubeconfig", kubeconfig)
	}
	p, err := s.start(command{
		name: name, program: "virtual-cloud", args: append(all, args...),
		env: []string{"VIRTUAL_CLOUD_API_TOKENS=" + c.APIToken, "VIRTUAL_CLOUD_ADMIN_TOKEN=" + adminToken},
	})
	if err != nil {
		return nil, err
	}
	c.Process = p
	if c.Endpoint, err = p.line(ctx, "listening "); err != nil {
		return nil, err
	}
	c.Admin, err = cloudapi.NewAdmin(c.Endpoint, adminToken)
	return c, err
}

// Instances returns what lives in the cloud.
func (c *Cloud) Instances(ctx context.Context) ([]cloudapi.Instance, error) {
	api, err := cloudapi.NewClient(c.Endpoint, c.APIToken)
	if err != nil {
		return nil, err
	}
	return api.List(ctx, cloudapi.Filter{})
}

// Created returns what the cloud's log tells of instances that came to be.
func (c *Cloud) Created(ctx context.Context) ([]cloudapi.LogEntry, error) {
	entries, err := c.Admin.Log(ctx, 0)
	if err != nil {
		return nil, err
	}
	var created []cloudapi.LogEntry
	for _, e := range entries {
		if e.Op == cloudapi.OpCreate && e.Event == cloudapi.EventCreated {
			created = append(created, e)
		}
	}
	return created, nil
}

// Hold makes creates of instances whose name matches a pattern take effect and
// then wait with their answer; without patterns it lets all go.
func (c *Cloud) Hold(ctx context.Context, patterns ...string) error {
	if patterns == nil {
		patterns = []string{}
	}
	effect := cloudapi.EffectStart
	_, err := c.Admin.Patch(ctx, cloudapi.KnobsPatch{Hold: &patterns, CreateEffect: &effect})
	return err
}
