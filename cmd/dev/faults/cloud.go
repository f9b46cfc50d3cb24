package main

import (
	"context"
	"errors"
	"time"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// turnKnobs sets knobs of the cloud during a rollout. It returns [errMissed] unless a
// figure of the cloud grows meanwhile.
func turnKnobs(ctx context.Context, w *world, e event, figure func(*cloudapi.Stats) int, there, back cloudapi.KnobsPatch) error {
	before, err := w.cloud.Admin.Stats(ctx)
	if err != nil {
		return err
	}
	if _, err := w.cloud.Admin.Patch(ctx, there); err != nil {
		return err
	}
	err = errors.Join(w.rollout(ctx, identities[e.pick%len(identities)], e, 2), wait(ctx, e.length))
	if err == nil {
		err = w.grows(ctx, figure, figure(before))
	}
	_, undone := w.cloud.Admin.Patch(context.WithoutCancel(ctx), back)
	return errors.Join(err, undone)
}

// grows waits for a while until a figure exceeds its value before.
func (w *world) grows(ctx context.Context, figure func(*cloudapi.Stats) int, before int) error {
	const patience = 5 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := stack.Poll(within, "a call meets the fault", func(ctx context.Context) error {
		now, err := w.cloud.Admin.Stats(ctx)
		if err == nil && figure(now) <= before {
			err = errMissed
		}
		return err
	})
	if err != nil && ctx.Err() == nil {
		return errors.Join(errMissed, err)
	}
	return err
}

func cloudErrors(ctx context.Context, w *world, _ *target, e event) error {
	const sometimes = 0.4
	rules := []cloudapi.Fault{{Operation: "*", Probability: sometimes, After: e.way&1 == 0, Drop: e.way&2 == 0}}
	return turnKnobs(ctx, w, e, func(s *cloudapi.Stats) int { return s.Faults },
		cloudapi.KnobsPatch{Faults: &rules}, cloudapi.KnobsPatch{Faults: &[]cloudapi.Fault{}})
}

// slowCall is the longest time that the cloud takes for a call.
const slowCall = 3 * time.Second

func cloudLatency(ctx context.Context, w *world, _ *target, e event) error {
	slow, usual, usualDelete := cloudapi.Duration(slowCall), cloudapi.Duration(createLatency), cloudapi.Duration(deleteLatency)
	effect, end := cloudapi.EffectStart, cloudapi.EffectEnd
	if e.way%2 == 0 {
		effect = end
	}
	mutations := func(s *cloudapi.Stats) int { return s.Requests[cloudapi.OpCreate] + s.Requests[cloudapi.OpDelete] }
	return turnKnobs(ctx, w, e, mutations, cloudapi.KnobsPatch{CreateLatency: &slow, DeleteLatency: &slow, CreateEffect: &effect},
		cloudapi.KnobsPatch{CreateLatency: &usual, DeleteLatency: &usualDelete, CreateEffect: &end})
}

func cloudRate(ctx context.Context, w *world, _ *target, e event) error {
	few, unlimited := 4.0, 0.0
	return turnKnobs(ctx, w, e, func(s *cloudapi.Stats) int { return s.Refused[cloudapi.CodeRateLimited] },
		cloudapi.KnobsPatch{RequestsPerSecond: &few}, cloudapi.KnobsPatch{RequestsPerSecond: &unlimited})
}

// cloudLists loses answers to creates while lists lag, so that a driver which looks for
// its instance does not find it yet. The lag never exceeds the drivers' settle time.
func cloudLists(ctx context.Context, w *world, _ *target, e event) error {
	const often = 0.6
	lag, none := cloudapi.Duration(listLag), cloudapi.Duration(0)
	rules := []cloudapi.Fault{{Operation: cloudapi.OpCreate, Probability: often, After: true, Drop: e.way%2 == 0}}
	return turnKnobs(ctx, w, e, func(s *cloudapi.Stats) int { return s.Hidden },
		cloudapi.KnobsPatch{ListLag: &lag, Faults: &rules},
		cloudapi.KnobsPatch{ListLag: &none, Faults: &[]cloudapi.Fault{}})
}
