package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// scalePatience bounds each part of the benchmark scale, whose machines may be
// thousands.
const scalePatience = 20 * time.Minute

// benchScale takes one MachineDeployment from nothing to many machines and back,
// and rolls it out in between. It runs once: each part is long enough to be its
// own mean.
func benchScale(ctx context.Context, b *bench) error {
	w, err := b.newWorld(ctx)
	if err != nil {
		return err
	}
	return errors.Join(b.scale(ctx, w), w.close())
}

func (b *bench) scale(ctx context.Context, w *world) error {
	p, err := w.newPool(ctx, b.examples)
	if err != nil {
		return err
	}
	rolled := min(b.pool, b.rolled)
	table := [][]string{{
		"part", "machines", "took", "requests for each", "CPU of mcm", "drivers", "cloud", "API server", "mcm's memory", "at most",
	}}
	before, err := w.spent(ctx)
	if err != nil {
		return err
	}
	for _, part := range []struct {
		name     string
		machines int
		do       func(context.Context) error
	}{
		{fmt.Sprintf("0 -> %d", b.pool), b.pool, func(ctx context.Context) error { return p.scaleTo(ctx, b.pool) }},
		{fmt.Sprintf("%d -> %d", b.pool, rolled), b.pool - rolled, func(ctx context.Context) error { return p.scaleTo(ctx, rolled) }},
		{fmt.Sprintf("rollout of %d", rolled), rolled, p.rollOut},
		{fmt.Sprintf("%d -> 0", rolled), rolled, func(ctx context.Context) error { return p.scaleTo(ctx, 0) }},
	} {
		start := time.Now()
		if err := part.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		took := time.Since(start)
		after, err := w.spent(ctx)
		if err != nil {
			return err
		}
		table = append(table, []string{
			part.name, strconv.Itoa(part.machines), seconds(took),
			fmt.Sprintf("%.2f", float64(after.requests-before.requests)/float64(max(1, part.machines))),
			seconds(after.cpu.mcm - before.cpu.mcm), seconds(after.cpu.drivers - before.cpu.drivers),
			seconds(after.cpu.cloud - before.cpu.cloud), seconds(after.cpu.apiServer - before.cpu.apiServer),
			mebibytes(after.memory.now), mebibytes(after.memory.most),
		})
		before = after
	}
	b.table(table...)
	return nil
}

// spending is what has been used up to a time.
type spending struct {
	requests int
	cpu      usage
	memory   memoryUse // of mcm
}

func (w *world) spent(ctx context.Context) (s spending, err error) {
	if s.requests, err = w.requests(ctx); err != nil {
		return s, err
	}
	if s.cpu, err = w.usage(); err != nil {
		return s, err
	}
	s.memory, err = memoryOf(w.manager.PID())
	return s, err
}

// A machinePool is the MachineDeployment of deploy/examples.
type machinePool struct {
	*world
	*v1alpha1.MachineDeployment
}

// newPool makes the pool without machines. A rollout may replace a quarter of
// them at a time.
func (w *world) newPool(ctx context.Context, examples string) (*machinePool, error) {
	const file = "pool/machinedeployment.yaml"
	objects, err := stack.LoadYAML(filepath.Join(examples, file))
	if err != nil {
		return nil, err
	}
	if len(objects) != 1 {
		return nil, fmt.Errorf("%s has %d objects, want one", file, len(objects))
	}
	p := &machinePool{world: w, MachineDeployment: &v1alpha1.MachineDeployment{}}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(objects[0].Object, p.MachineDeployment); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	quarter, none := intstr.FromString("25%"), intstr.FromInt32(0)
	p.Namespace, p.Spec.Replicas = namespace, 0
	p.Spec.Strategy.RollingUpdate.MaxSurge, p.Spec.Strategy.RollingUpdate.MaxUnavailable = &quarter, &none
	return p, w.kube.Create(ctx, p.MachineDeployment)
}

func (p *machinePool) scaleTo(ctx context.Context, replicas int) error {
	return p.change(ctx, func(s *v1alpha1.MachineDeploymentSpec) { s.Replicas = int32(replicas) })
}

func (p *machinePool) rollOut(ctx context.Context) error {
	return p.change(ctx, func(s *v1alpha1.MachineDeploymentSpec) {
		metav1.SetMetaDataAnnotation(&s.Template.ObjectMeta, "bench/rollout", "1")
	})
}

// change changes the pool, and returns when it has exactly the desired machines.
func (p *machinePool) change(ctx context.Context, f func(*v1alpha1.MachineDeploymentSpec)) error {
	before := p.DeepCopy()
	f(&p.Spec)
	if err := p.kube.Patch(ctx, p.MachineDeployment, client.MergeFrom(before)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, scalePatience, fmt.Errorf("not within %s", scalePatience))
	defer cancel()
	return p.site.Poll(ctx, fmt.Sprintf("the pool has its %d machines", p.Spec.Replicas), func(ctx context.Context) error {
		if err := p.kube.Get(ctx, client.ObjectKeyFromObject(p.MachineDeployment), p.MachineDeployment); err != nil {
			return err
		}
		s, n := p.Status, p.Spec.Replicas
		if s.ObservedGeneration != p.Generation || s.Replicas != n || s.UpdatedReplicas != n || s.ReadyReplicas != n {
			return fmt.Errorf("%d machines, of the latest template %d, ready %d", s.Replicas, s.UpdatedReplicas, s.ReadyReplicas)
		}
		return nil
	})
}
