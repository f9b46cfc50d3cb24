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

	// Admin changes its knobs and reads its log.
	Admin *cloudapi.Admin
	// Endpoint and APIToken are for drivers.
	Endpoint, APIToken string
}

// StartCloud starts a cloud whose instances join the cluster of kubeconfig as
// Nodes; with an empty one they join none.
func (s *Site) StartCloud(ctx context.Context, name, kubeconfig string, args ...string) (*Cloud, error) {
	token := strings.ToLower(rand.Text())
	file, err := s.writeSecret(name+".token", token)
	if err != nil {
		return nil, err
	}
	all := []string{"--listen", Loopback(0), "--api-token-file", file, "--log", s.path(name + ".jsonl")}
	if kubeconfig != "" {
		all = append(all, "--join-kubeconfig", kubeconfig)
	}
	p, err := s.Start(name, "virtual-cloud", append(all, args...)...)
	if err != nil {
		return nil, err
	}
	c := &Cloud{Process: p, APIToken: token}
	if c.Endpoint, err = p.line(ctx, "listening "); err != nil {
		return nil, err
	}
	c.Admin, err = cloudapi.NewAdmin(c.Endpoint, token)
	return c, err
}

// Instances returns the instances of the cloud.
func (c *Cloud) Instances(ctx context.Context) ([]cloudapi.Instance, error) {
	api, err := cloudapi.NewClient(c.Endpoint, c.APIToken)
	if err != nil {
		return nil, err
	}
	return api.List(ctx, cloudapi.Filter{})
}

// Created returns the entries of the cloud's log about created instances.
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

// Hold holds back the answers to creates of instances whose name matches a pattern; the
// instances exist at once. Without patterns it releases all.
func (c *Cloud) Hold(ctx context.Context, patterns ...string) error {
	if patterns == nil {
		patterns = []string{}
	}
	effect := cloudapi.EffectStart
	_, err := c.Admin.Patch(ctx, cloudapi.KnobsPatch{Hold: &patterns, CreateEffect: &effect})
	return err
}
