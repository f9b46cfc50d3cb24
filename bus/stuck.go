package bus

import (
	"bytes"
	"context"
	"fmt"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// stuckCheck is the longest time between two looks for calls that ignore their
	// deadlines.
	stuckCheck = time.Second
	// operationLabel marks the goroutines of a mutation, in profiles too.
	operationLabel = "machinebus_operation"
	// maxStack bounds what the log gets of a call's goroutines.
	maxStack = 16 << 10
)

// Stuck counts the calls that have ignored their deadlines for longer than
// [ServerConfig.StuckAfter] and have not returned, by operation. Each was answered with
// DEADLINE_EXCEEDED. Until it returns it keeps its slot, and its machine from other
// mutations at this replica.
func (s *Server) Stuck() map[driverv1.Operation]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	count := map[driverv1.Operation]int{}
	for h := range s.stuck {
		count[h.operation]++
	}

	return count
}

// Jammed returns an error when calls that ignore their deadlines have all slots for some
// operations, nil otherwise.
func (s *Server) Jammed() error {
	const remedy = "are taken by calls that ignore their deadlines: restart this replica; its log has their stacks"
	s.mu.Lock()
	defer s.mu.Unlock()
	reads, deletes, others := 0, 0, 0
	for h := range s.stuck {
		switch {
		case !Mutates(h.operation):
			reads++
		case h.operation == driverv1.Operation_OPERATION_DELETE:
			deletes++
		default:
			others++
		}
	}
	switch slots := s.cfg.Slots; {
	case others >= slots:
		return fmt.Errorf("all %d slots for creates %s", slots, remedy)
	case deletes >= slots:
		return fmt.Errorf("all %d slots for deletes %s", slots, remedy)
	case reads >= slots:
		return fmt.Errorf("all %d slots for reads %s", slots, remedy)
	default:
		return nil
	}
}

// giveUpStuck looks for calls that ignore their deadlines until ctx ends.
func (s *Server) giveUpStuck(ctx context.Context) {
	tick := time.NewTicker(min(stuckCheck, s.cfg.StuckAfter))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.giveUp(now)
		}
	}
}

// giveUp answers the calls that have ignored their deadlines for too long. Their late
// results count for nothing, see unstick.
func (s *Server) giveUp(now time.Time) {
	s.mu.Lock()
	overdue := s.overdue(now)
	s.mu.Unlock()
	if len(overdue) == 0 {
		return
	}
	// Before anything is noted: that takes long enough for a session to be sent, and a
	// result is to come ahead of a session that does not list its operation.
	profile := &bytes.Buffer{}
	_ = pprof.Lookup("goroutine").WriteTo(profile, 1) // a Buffer takes everything
	results := map[*held]*driverv1.Result{}
	s.mu.Lock()
	for _, h := range s.overdue(now) {
		h.stuck = true
		s.stuck[h] = struct{}{}
		results[h] = s.stuckResult(h)
		s.note(h, results[h], true)
	}
	s.mu.Unlock()
	for h, result := range results {
		s.tell(h, result)
		s.log.Error("a driver call ignores its deadline; until it returns it keeps its slot, and other mutations from its machine: "+
			"mend the driver, or restart this replica", "operation", Verb(h.operation), "operation_id", h.id,
			"machine", h.namespace+"/"+h.name, "attempt", h.request.GetAttempt(), "elapsed", now.Sub(h.started).Round(time.Millisecond),
			"stack", stackOf(profile.String(), h.key()))
		s.tasks.Done()
	}
}

// overdue returns the calls that have ignored their deadlines for too long and were not
// given up yet. Server.mu is held.
func (s *Server) overdue(now time.Time) []*held {
	var all []*held
	consider := func(h *held) {
		if !h.claiming && !h.returned && !h.stuck && now.Sub(h.deadline) >= s.cfg.StuckAfter {
			all = append(all, h)
		}
	}
	for _, h := range s.machines {
		consider(h)
	}
	for h := range s.reads {
		consider(h)
	}

	return all
}

func (s *Server) stuckResult(h *held) *driverv1.Result {
	text := fmt.Sprintf("driver has not returned from %s %s after its deadline: restart replica %s, or mend the driver",
		Verb(h.operation), s.cfg.StuckAfter, s.cfg.Replica)
	if Mutates(h.operation) {
		text += "; until it returns only other replicas do anything for the machine; the replica's log has the stack"
	}

	return failure(driverv1.Code_CODE_DEADLINE_EXCEEDED, text)
}

// unstick notes that the handler has returned. It reports whether it was given up before:
// then this frees what it had occupied, and nothing else is to be done with its result.
func (s *Server) unstick(h *held, result *driverv1.Result) bool {
	s.mu.Lock()
	h.returned = true
	stuck := h.stuck
	if stuck {
		delete(s.stuck, h)
		s.free(h)
	}
	s.mu.Unlock()
	if !stuck {
		return false
	}
	instance, _ := createdOf(result)
	s.log.Warn("a driver call that ignored its deadline has returned; its slot and machine are free again",
		"operation", Verb(h.operation), "operation_id", h.id, "machine", h.namespace+"/"+h.name,
		"elapsed", time.Since(h.started).Round(time.Millisecond),
		"code", CodeName(result.GetStatus().GetCode()), "provider_id", instance.GetProviderId())
	s.renewNow() // who waits for the slot learns of it

	return true
}

// stuckStates lists a control plane's calls that ignore their deadlines. Server.mu is held.
func (s *Server) stuckStates(cluster string, now time.Time) []*driverv1.OperationState {
	var states []*driverv1.OperationState
	for h := range s.stuck {
		if h.cluster == cluster && Mutates(h.operation) {
			states = append(states, &driverv1.OperationState{
				OperationId: h.id, Attempt: h.attempt, Operation: h.operation, Namespace: h.namespace, Name: h.name,
				Elapsed: durationpb.New(now.Sub(h.started)), Stuck: true, LastProgress: "ignores its deadline; the replica's log has the stack",
			})
		}
	}

	return states
}

// handleNamed is handle with goroutines that can be told from others, should they hang.
// Reads are many, and each would be slower for it.
func (s *Server) handleNamed(ctx context.Context, task *Task) (result *driverv1.Result, told bool) {
	if !Mutates(task.Operation) {
		return s.handle(ctx, task)
	}
	pprof.Do(ctx, pprof.Labels(operationLabel, task.held.key()), func(ctx context.Context) {
		result, told = s.handle(ctx, task)
	})

	return result, told
}

// stackOf returns what a profile of all goroutines says of those of one operation.
func stackOf(profile, operation string) string {
	label := strconv.Quote(operationLabel) + ":" + strconv.Quote(operation)
	text := ""
	for goroutine := range strings.SplitSeq(profile, "\n\n") {
		switch {
		case !strings.Contains(goroutine, label):
		case strings.Contains(goroutine, "bus.(*Server).handle"): // the call itself comes first
			text = goroutine + "\n" + text
		default: // what it has started, such as connections
			text += goroutine + "\n"
		}
	}
	if text == "" {
		return "not known; SIGQUIT ends this process and prints all stacks"
	}

	return text[:min(len(text), maxStack)]
}

// stuckCalls is how many calls are stuck.
func (s *Server) stuckCalls() int {
	s.mu.Lock()
	defer s.mu.Unlock()

	return len(s.stuck)
}
