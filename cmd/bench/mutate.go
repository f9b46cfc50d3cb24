package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/cmd/internal/stack"
	"github.com/machinebus/machinebus/driversdk"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// benchMutate compares a create, accepted, claimed and acknowledged, with the minimum: a
// request and its reply, and one acknowledged compare-and-set from the driver's side.
func benchMutate(ctx context.Context, b *bench) error {
	store, err := filepath.Abs(filepath.Join(b.dir, "mutate"))
	if err != nil {
		return err
	}
	if err := os.RemoveAll(store); err != nil { // its machines would not be new
		return err
	}
	rig, err := newReadRig(ctx, rigOptions{inProcess: true, store: store})
	if err != nil {
		return err
	}
	claimer, err := nats.Connect(rig.server.URL())
	if err != nil {
		return errors.Join(err, rig.close())
	}
	rig.closing(claimer.Close)
	if err := makeRoom(ctx, claimer); err != nil {
		return errors.Join(err, rig.close())
	}
	table := [][]string{{"in flight", "peer p50", "bus p50", "peer p99", "bus p99", "peer /s", "bus /s", "p50 ratios", "/s ratios"}}
	var ratios []float64
	for _, inFlight := range []int{1, 16} {
		result, err := compare(ctx, b.rounds, closed(inFlight), rig.withClaim(claimer), rig.callCreate)
		if err != nil {
			return errors.Join(fmt.Errorf("%d in flight: %w", inFlight, err), rig.close())
		}
		table = append(table, append([]string{strconv.Itoa(inFlight)}, result.row()...))
		ratios = append(ratios, median(result.p50))
	}
	b.table(table...)
	b.atMost("mutate-1-p50", ratios[0], 1.5)
	b.atMost("mutate-16-p50", ratios[1], 1.5)
	return rig.close()
}

// makeRoom lets the operations stream hold the records of both sides: mcm does so as
// well, but not within the seconds in which the machines of a day are made here.
func makeRoom(ctx context.Context, nc *nats.Conn) error {
	const room = 1 << 30
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, readySoon, fmt.Errorf("not within %s", readySoon))
	defer cancel()
	return stack.Poll(ctx, "the operations stream is there", func(ctx context.Context) error {
		s, err := js.Stream(ctx, bus.StreamName(readCluster, readProvider))
		if err != nil {
			return err
		}
		cfg := s.CachedInfo().Config
		cfg.MaxBytes = room
		_, err = js.UpdateStream(ctx, cfg)
		return err
	})
}

// withClaim is the peer's read, and the compare-and-set of a fresh subject.
func (r *readRig) withClaim(driver *nats.Conn) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := r.callPeer(ctx); err != nil {
			return err
		}
		payload, err := bus.Encode(r.request, "")
		if err != nil {
			return err
		}
		m := nats.NewMsg("mcm.v1." + readCluster + ".claim." + readProvider + ".peer-" + strconv.FormatUint(reads.Add(1), 10))
		m.Data = payload
		m.Header.Set("Nats-Expected-Last-Subject-Sequence", "0")
		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		reply, err := driver.RequestMsgWithContext(ctx, m)
		if err != nil {
			return err
		}
		var ack struct {
			Error *struct {
				Description string `json:"description"`
			} `json:"error"`
		}
		if err := json.Unmarshal(reply.Data, &ack); err != nil {
			return fmt.Errorf("answer of JetStream: %w", err)
		}
		if ack.Error != nil {
			return fmt.Errorf("JetStream: %s", ack.Error.Description)
		}
		return nil
	}
}

// callCreate is one create of a new machine.
func (r *readRig) callCreate(ctx context.Context) error {
	env := statusRequest()
	machine := env.GetStatus().GetMachine()
	machine.Uid = "bus-" + strconv.FormatUint(reads.Add(1), 10)
	id := machine.GetUid() + ".create.0"
	out, err := r.caller.Call(ctx, caller.Request{
		Provider: readProvider, Namespace: "shop", Name: machine.GetName(), Timeout: readTimeout, OperationID: id,
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{
			Machine: machine, Class: env.GetStatus().GetClass(),
		}}},
	})
	if err != nil {
		return err
	}
	return r.caller.Acknowledge(readProvider, out.Replica, id)
}

func (*readDriver) Create(_ context.Context, req *driversdk.Request[readSpec]) (*driversdk.Instance, error) {
	return &driversdk.Instance{ProviderID: "bench:///moon/" + req.Machine.UID, NodeName: req.Machine.Name}, nil
}
