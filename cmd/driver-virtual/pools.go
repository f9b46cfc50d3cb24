package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/machinebus/machinebus/cmd/driver-virtual/virtual"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloud"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// mockPools are the default pools of a mock cloud.
const mockPools = "mock-a=0:10,mock-b=1:5"

// pools holds the flags for node groups.
type pools struct {
	endpoint, tokenFile string
	mock                []cloudapi.Pool
}

func (p *pools) addFlags(fs *flag.FlagSet) {
	fs.StringVar(&p.endpoint, "node-groups-endpoint", "",
		"`URL` of a virtual cloud whose pools are served to mcm-autoscaler as node groups; empty for none")
	fs.StringVar(&p.tokenFile, "node-groups-token-file", "", "`file` with that cloud's API token; empty for a cloud without tokens")
	fs.BoolFunc("mock-node-groups", "serve node groups of a mock cloud in this process, whose instances join no cluster, to try out "+
		"an autoscaler; run only one replica; `id=min:max,...`, default "+mockPools, func(text string) error {
		if text == "true" { // the flag alone
			text = mockPools
		}
		var err error
		p.mock, err = parsePools(text)

		return err
	})
}

// parsePools reads id=min:max,...
func parsePools(text string) ([]cloudapi.Pool, error) {
	var list []cloudapi.Pool
	for one := range strings.SplitSeq(text, ",") {
		name, sizes, ok1 := strings.Cut(one, "=")
		lower, upper, ok2 := strings.Cut(sizes, ":")
		const bits = 32
		low, err1 := strconv.ParseInt(lower, 10, bits)
		high, err2 := strconv.ParseInt(upper, 10, bits)
		if !ok1 || !ok2 || name == "" || errors.Join(err1, err2) != nil || low < 0 || low > high || high == 0 {
			return nil, fmt.Errorf("%q: want id=min:max with 0 <= min <= max and 0 < max", one)
		}
		list = append(list, cloudapi.Pool{
			Name: name, Min: int32(low), Max: int32(high), MachineType: "mock", Region: "mock",
		})
	}

	return list, nil
}

// connect returns a client of the cloud with the pools; nil if there are none.
func (p *pools) connect(ctx context.Context) (*cloudapi.Client, error) {
	switch {
	case p.mock != nil && p.endpoint != "":
		return nil, errors.New("--mock-node-groups and --node-groups-endpoint cannot be combined: choose one")
	case p.mock != nil:
		return p.startMock(ctx)
	case p.endpoint == "":
		return nil, nil //nolint:nilnil // no pools is not an error
	}
	token := ""
	if p.tokenFile != "" {
		content, err := os.ReadFile(p.tokenFile)
		if err != nil {
			return nil, fmt.Errorf("--node-groups-token-file: %w", err)
		}
		token = strings.TrimSpace(string(content))
	}
	client, err := cloudapi.NewClient(p.endpoint, token)
	if err != nil {
		return nil, fmt.Errorf("--node-groups-endpoint: %w", err)
	}

	return client, nil
}

// startMock runs a cloud on a free port of this host, with the pools at their
// minimum.
func (p *pools) startMock(ctx context.Context) (*cloudapi.Client, error) {
	c, err := cloud.New(ctx, cloud.Options{})
	if err != nil {
		return nil, fmt.Errorf("--mock-node-groups: %w", err)
	}
	for _, pool := range p.mock {
		if _, err = c.PutPool(pool); err == nil && pool.Min > 0 {
			_, err = c.ResizePool(pool.Name, cloudapi.ResizeRequest{Size: pool.Min})
		}
		if err != nil {
			return nil, fmt.Errorf("--mock-node-groups: %w", err)
		}
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("--mock-node-groups: %w", err)
	}
	server := &http.Server{Handler: cloud.NewHandler(c, ""), ReadHeaderTimeout: time.Minute}
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			slog.Error("the mock cloud of node groups stopped", "err", err)
		}
	}()
	context.AfterFunc(ctx, func() { _ = server.Close() })
	slog.Warn("serving mock node groups, which have no real instances", "endpoint", "http://"+listener.Addr().String())

	return cloudapi.NewClient("http://"+listener.Addr().String(), "")
}

// driver returns d with the node groups; nil if there are none.
func (p *pools) driver(ctx context.Context, d *virtual.Driver) (*virtual.Pooled, error) {
	client, err := p.connect(ctx)
	if err != nil || client == nil {
		return nil, err
	}

	return &virtual.Pooled{Driver: d, Cloud: client}, nil
}
