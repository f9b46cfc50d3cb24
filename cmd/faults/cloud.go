package main

import (
	"context"
	"errors"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// turn sets knobs of the cloud for a while. Unless a figure of the cloud grows
// meanwhile it has missed.
func turn(ctx context.Context, w *world, e event, figure func(*cloudapi.Stats) int, there, back cloudapi.KnobsPatch) error {
	before, err := w.cloud.Admin.Stats(ctx)
	if err != nil {
		return err
	}
	if _, err := w.cloud.Admin.Patch(ctx, there); err != nil {
		return err
	}
	err = wait(ctx, e.length)
	_, undone := w.cloud.Admin.Patch(context.WithoutCancel(ctx), back)
	after, unknown := w.cloud.Admin.Stats(context.WithoutCancel(ctx))
	if err := errors.Join(err, undone, unknown); err != nil {
		return err
	}
	if figure(after) == figure(before) {
		return errMissed
	}
	return nil
}

func cloudErrors(ctx context.Context, w *world, _ *target, e event) error {
	const sometimes = 0.4
	rules := []cloudapi.Fault{{Operation: "*", Probability: sometimes, After: e.way&1 == 0, Drop: e.way&2 == 0}}
	return turn(ctx, w, e, func(s *cloudapi.Stats) int { return s.Faults },
		cloudapi.KnobsPatch{Faults: &rules}, cloudapi.KnobsPatch{Faults: &[]cloudapi.Fault{}})
}

func cloudLatency(ctx context.Context, w *world, _ *target, e event) error {
	slow, usual, usualDelete := cloudapi.Duration(3*time.Second), cloudapi.Duration(createLatency), cloudapi.Duration(deleteLatency)
	effect, end := cloudapi.EffectStart, cloudapi.EffectEnd
	if e.way%2 == 0 {
		effect = end
	}
	mutations := func(s *cloudapi.Stats) int { return s.Requests[cloudapi.OpCreate] + s.Requests[cloudapi.OpDelete] }
	return turn(ctx, w, e, mutations, cloudapi.KnobsPatch{CreateLatency: &slow, DeleteLatency: &slow, CreateEffect: &effect},
		cloudapi.KnobsPatch{CreateLatency: &usual, DeleteLatency: &usualDelete, CreateEffect: &end})
}

func cloudRate(ctx context.Context, w *world, _ *target, e event) error {
	few, unlimited := 4.0, 0.0
	return turn(ctx, w, e, func(s *cloudapi.Stats) int { return s.Refused[cloudapi.CodeRateLimited] },
		cloudapi.KnobsPatch{RequestsPerSecond: &few}, cloudapi.KnobsPatch{RequestsPerSecond: &unlimited})
}

// cloudLists has lists show new instances late. An instance keeps the lag that it
// began with, so nothing is hidden longer than drivers were told.
func cloudLists(ctx context.Context, w *world, _ *target, e event) error {
	lag, none := cloudapi.Duration(listLag), cloudapi.Duration(0)
	return turn(ctx, w, e, func(s *cloudapi.Stats) int { return s.Hidden },
		cloudapi.KnobsPatch{ListLag: &lag}, cloudapi.KnobsPatch{ListLag: &none})
}
