package drivertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// queueRounds is how many requests are sent to see that a queue group shares them.
const queueRounds = 24

// tree is the pattern of what any replica may take.
func (s *suite) tree() string {
	if s.plain {
		return s.below("plain." + s.cfg.Provider + ".")
	}

	return s.below("driver." + s.cfg.Provider + ".")
}

func checkQueue(ctx context.Context, s *suite) error {
	behind := func() error {
		return s.eventually(ctx, "the replica has a slot for a list", func() (bool, error) {
			_, err := s.list(ctx)
			if _, busy := errors.AsType[*busyError](err); busy {
				return false, nil
			}

			return true, err
		})
	}
	err := s.shared(ctx, s.tree()+">", behind, func() (func() bool, error) {
		x, err := s.send(request{
			subject: s.tree() + "list." + s.cfg.Class.Namespace + "." + s.cfg.Class.Name,
			env:     s.envelope("read-"+nuid.Next(), s.listBody()),
		})

		return func() bool { return x.accepted+x.results > 0 || len(x.frames) > 0 }, err
	})
	if err == nil && s.plain {
		err = s.witnessed("SUBJECT-3")
	}

	return err
}

// shared joins the queue group of a tree: each request must reach one member only.
// Ask sends one; what it returns tells, under s.mu, whether the driver has it. Behind
// has another one answered.
func (s *suite) shared(ctx context.Context, tree string, behind func() error, ask func() (answered func() bool, err error)) error {
	if err := behind(); err != nil { // so that it has what it needs for its answers
		return err
	}
	var ours atomic.Int64
	sub, err := s.nc.QueueSubscribe(tree, "driver", func(*nats.Msg) { ours.Add(1) })
	if err != nil {
		return fmt.Errorf("join the queue group: %w", err)
	}
	leave := sync.OnceFunc(func() { _ = sub.Unsubscribe() }) // fails only on a closed connection
	defer leave()
	if err := s.flush(ctx); err != nil {
		return err
	}
	var asked []func() bool
	for range queueRounds {
		answered, err := ask()
		if err != nil {
			return err
		}
		asked = append(asked, answered)
	}
	answered := func() (n int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, is := range asked {
			if is() {
				n++
			}
		}

		return n
	}
	err = s.eventually(ctx, fmt.Sprintf("each of %d requests is taken by the driver or by another member of queue group driver", queueRounds),
		func() (bool, error) { return answered()+int(ours.Load()) >= queueRounds, nil })
	if err != nil {
		return fmt.Errorf("%w: %d were answered", err, answered())
	}
	leave()
	if err := behind(); err != nil { // by then it has all that it gets
		return err
	}
	if err := pause(ctx, silence); err != nil { // for what must not come
		return err
	}
	theirs := answered()
	if theirs+int(ours.Load()) > queueRounds || ours.Load() == 0 {
		return fmt.Errorf("of %d requests the driver answered %d and another member of queue group driver got %d: "+
			"the driver does not share the group", queueRounds, theirs, ours.Load())
	}

	return nil
}

func checkReplicaTree(ctx context.Context, s *suite) error {
	if _, err := s.list(ctx); err != nil { // is sent there
		return err
	}
	_, err := s.ops(ctx, "", 0)

	return err
}

func checkReplyTree(ctx context.Context, s *suite) error {
	return s.elsewhere(func(reply string) error {
		_, err := s.send(request{
			subject: s.subject("list", s.cfg.Class.Name), env: s.envelope("read-"+nuid.Next(), s.listBody()), reply: reply,
		})
		if err == nil {
			_, err = s.list(ctx) // behind it
		}

		return err
	})
}

// elsewhere asks for answers where the provider has no business.
func (s *suite) elsewhere(ask func(reply string) error) error {
	for _, place := range []struct{ what, reply string }{
		{"another provider's reply tree", s.below("reply." + s.cfg.Provider + "-other.x." + nuid.Next())},
		{"an inbox", "_INBOX." + nuid.Next()},
	} {
		sub, err := s.nc.SubscribeSync(place.reply)
		if err != nil {
			return fmt.Errorf("subscribe to %s: %w", place.reply, err)
		}
		if err = ask(place.reply); err == nil {
			_, err = sub.NextMsg(silence)
			if err == nil {
				err = fmt.Errorf("a request was answered to %s", place.what)
			} else if errors.Is(err, nats.ErrTimeout) {
				err = nil
			}
		}
		_ = sub.Unsubscribe() // fails only on a closed connection
		if err != nil {
			return err
		}
	}

	return nil
}

// json asks for a list in JSON and returns the first frame.
func (s *suite) json(ctx context.Context) (frame, error) {
	x, err := s.send(request{
		subject: s.subject("list", s.cfg.Class.Name), env: s.envelope("read-"+nuid.Next(), s.listBody()), json: true,
	})
	if err != nil {
		return frame{}, err
	}
	for {
		f, err := x.first(ctx, s.late())
		if err != nil || f.GetResult() != nil {
			return f, err
		}
	}
}

func checkContentType(ctx context.Context, s *suite) error {
	if err := s.witnessed("ENV-1"); err != nil {
		return err
	}
	x, err := s.send(request{
		subject: s.subject("list", s.cfg.Class.Name), env: s.envelope("read-"+nuid.Next(), s.listBody()),
	})
	if err != nil {
		return err
	}
	f, err := x.first(ctx, s.late())
	if err == nil && f.contentType == contentTypeJSON {
		err = errors.New("a protobuf request was answered in JSON")
	}
	if err != nil {
		return err
	}
	if f, err = s.json(ctx); err == nil && f.contentType != contentTypeJSON {
		err = fmt.Errorf("the answer to a JSON request has Content-Type %q", f.contentType)
	}

	return err
}

func checkJSON(ctx context.Context, s *suite) error {
	f, err := s.json(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("list in JSON: %w", err)
	case f.contentType != contentTypeJSON:
		return fmt.Errorf("a list in JSON was answered with Content-Type %q", f.contentType)
	case f.GetResult().GetStatus().GetCode() != driverv1.Code_CODE_OK:
		return fmt.Errorf("list in JSON failed: %s", said(f.GetResult()))
	}
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	f, err = s.json(ctx)
	undo()
	switch {
	case err != nil:
		return fmt.Errorf("list in JSON, and no class to be had: %w", err)
	case f.contentType != contentTypeJSON:
		return fmt.Errorf("a list in JSON failed, and that was answered with Content-Type %q", f.contentType)
	}

	return s.none(ctx, s.newMachine(), "nothing was made")
}

// checkEmpty sends what NATS itself sends when nobody listens, and nonsense.
func checkEmpty(ctx context.Context, s *suite) error {
	for _, bad := range []struct {
		what    string
		payload []byte
	}{{"an empty request", []byte{}}, {"a request that is no envelope", []byte{0xff, 0xff, 0xff}}} {
		reply := s.replies + nuid.Next()
		sub, err := s.nc.SubscribeSync(reply)
		if err != nil {
			return fmt.Errorf("subscribe to %s: %w", reply, err)
		}
		if _, err := s.send(request{subject: s.subject("list", s.cfg.Class.Name), payload: bad.payload, reply: reply}); err != nil {
			return err
		}
		if _, err := s.list(ctx); err != nil {
			return fmt.Errorf("after %s: %w", bad.what, err)
		}
		m, err := sub.NextMsg(silence)
		_ = sub.Unsubscribe() // fails only on a closed connection
		if err == nil && len(m.Data) == 0 {
			return fmt.Errorf("%s was answered with an empty frame", bad.what)
		}
	}

	return s.witnessed("ENV-3")
}

// Numbers that no field of an Envelope has.
const (
	unknownField = 3000
	unknownBody  = 2000
)

func checkUnknown(ctx context.Context, s *suite) error {
	env := s.envelope("read-"+nuid.Next(), s.listBody())
	payload, err := bus.Encode(env, "")
	if err != nil {
		return err
	}
	payload = protowire.AppendTag(payload, unknownField, protowire.BytesType)
	payload = protowire.AppendString(payload, "of a newer contract")
	x, err := s.send(request{subject: s.subject("list", s.cfg.Class.Name), env: env, payload: payload})
	if err != nil {
		return err
	}
	result, err := x.result(ctx, s.late())
	if err == nil && result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		err = fmt.Errorf("it answered %s", said(result))
	}
	if err != nil {
		return fmt.Errorf("a request with an unknown field: %w", err)
	}
	bare := s.envelope("read-"+nuid.Next(), &driverv1.Envelope{})
	if payload, err = bus.Encode(bare, ""); err != nil {
		return err
	}
	payload = protowire.AppendTag(payload, unknownBody, protowire.BytesType)
	payload = protowire.AppendBytes(payload, nil)
	if x, err = s.send(request{subject: s.subject("teleport", s.cfg.Class.Name), env: bare, payload: payload}); err != nil {
		return err
	}
	result, err = x.result(ctx, s.late())
	if err == nil && result.GetStatus().GetCode() != driverv1.Code_CODE_UNIMPLEMENTED {
		err = fmt.Errorf("want Unimplemented, and it answered %s", said(result))
	}
	if err != nil {
		return fmt.Errorf("a request with an unknown body: %w", err)
	}

	return nil
}

func checkEpoch(ctx context.Context, s *suite) error {
	m := s.newMachine()
	s.epoch += 2
	if err := s.remove(ctx, m); err != nil {
		return fmt.Errorf("in epoch %d: %w", s.epoch, err)
	}
	if err := s.refusesEpoch(ctx, m); err != nil {
		return err
	}
	announcer, err := bus.NewAnnouncer(s.conn, s.cfg.Cluster)
	if err != nil {
		return err
	}
	s.epoch += 2
	if err := announcer.Hello(s.hello()); err != nil {
		return err
	}
	if err := s.eventually(ctx, fmt.Sprintf("sessions say epoch %d, which a hello has told of", s.epoch),
		func() (bool, error) { return s.session().GetEpoch() >= s.epoch, nil }); err != nil {
		return err
	}
	if err := s.refusesEpoch(ctx, m); err != nil {
		return fmt.Errorf("after a hello: %w", err)
	}

	return nil
}

// checkProtocol has a manager lead that speaks none of the replica's versions of the
// contract, and then one that does.
func checkProtocol(ctx context.Context, s *suite) (err error) {
	const later = 1000 // no replica speaks it
	announcer, err := bus.NewAnnouncer(s.conn, s.cfg.Cluster)
	if err != nil {
		return err
	}
	m := s.newMachine()
	hello := s.hello()
	hello.ProtocolMin, hello.ProtocolMax = later, later+1
	if err := announcer.Hello(hello); err != nil {
		return err
	}
	defer func() { // the clauses after this one need work to be taken
		err = errors.Join(err, announcer.Hello(s.hello()))
		if err == nil {
			err = s.eventually(ctx, "a delete is taken again", func() (bool, error) { return s.remove(ctx, m) == nil, nil })
		}
	}()

	return s.eventually(ctx, "a delete is answered busy (BUSY_REASON_PROTOCOL)", func() (bool, error) {
		reason, err := s.busyReason(ctx, m)

		return reason == driverv1.BusyReason_BUSY_REASON_PROTOCOL, err
	})
}

// busyReason asks for a delete, and returns why the replica is busy, if it is.
func (s *suite) busyReason(ctx context.Context, m *machine) (driverv1.BusyReason, error) {
	r, err := s.mutation(ctx, m, m.operation(remove), s.deleteBody(m))
	if err != nil {
		return 0, err
	}
	x, err := s.send(r)
	if err != nil {
		return 0, err
	}
	f, err := x.first(ctx, s.cfg.Patience)

	return f.GetBusy().GetReason(), err
}

// hello is the word of another leading manager than any before.
func (s *suite) hello() *driverv1.Hello {
	return &driverv1.Hello{ClusterUid: ownerUID, Epoch: s.epoch, Key: s.fetches.key.Public(), Mcm: "conformance-" + nuid.Next()}
}

// refusesEpoch asks for a create, and for a list, in the epoch before the present one.
func (s *suite) refusesEpoch(ctx context.Context, m *machine) error {
	result, err := s.attempt(ctx, m, m.operation(create), s.createBody(m),
		func(env *driverv1.Envelope) { env.Epoch = s.epoch - 1 })
	if err != nil {
		return fmt.Errorf("in epoch %d, after %d: %w", s.epoch-1, s.epoch, err)
	}
	if result.GetStatus().GetCode() != driverv1.Code_CODE_ABORTED || !result.GetOutcomeUnknown() {
		return fmt.Errorf("a create of epoch %d, after one of %d, was answered %s, not Aborted (outcome unknown)", s.epoch-1, s.epoch, said(result))
	}
	if err := s.none(ctx, m, "the create was of a lower epoch"); err != nil {
		return err
	}
	env := s.envelope("read-"+nuid.Next(), s.listBody())
	env.Epoch = s.epoch - 1
	x, err := s.send(request{subject: s.subject("list", s.cfg.Class.Name), env: env})
	if err != nil {
		return err
	}
	if result, err = x.result(ctx, s.late()); err == nil && result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		err = fmt.Errorf("a list of a lower epoch was answered %s", said(result))
	}

	return err
}

func checkStale(ctx context.Context, s *suite) error {
	m := s.newMachine()
	r, err := s.mutation(ctx, m, m.operation(driverv1.Operation_OPERATION_CREATE), s.createBody(m))
	if err != nil {
		return err
	}
	r.env.AcceptBy = timestamppb.New(time.Now().Add(-time.Minute))
	x, err := s.send(r)
	if err != nil {
		return err
	}
	f, err := x.first(ctx, s.cfg.Patience)
	if err != nil {
		return fmt.Errorf("a create that was to be accepted a minute ago: %w", err)
	}
	if f.GetBusy() == nil {
		return fmt.Errorf("a create that was to be accepted a minute ago was answered %s, not busy", describe(f))
	}

	return s.none(ctx, m, "the create was stale")
}
