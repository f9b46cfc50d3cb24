package main

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"
)

const controllerManagerName = "kube-controller-manager"

// defaultControllers are those that affect programs which manage machines and nodes: for owner references, budgets,
// pods of nodes that are NotReady, workloads to drain, kubelets that join by bootstrap token, and autoscaling through
// scale subresources. The attach-detach controller is omitted, as it does not work without kubelets; tests play it.
var defaultControllers = []string{
	names.NamespaceController,
	names.GarbageCollectorController,
	names.PodGarbageCollectorController,
	names.ServiceAccountController,
	names.ServiceAccountTokenController,
	names.ClusterRoleAggregationController,
	names.BootstrapSignerController,
	names.TokenCleanerController,
	names.CertificateSigningRequestApprovingController,
	names.CertificateSigningRequestSigningController,
	names.DisruptionController,
	names.NodeLifecycleController,
	names.TaintEvictionController,
	names.DeploymentController,
	names.ReplicaSetController,
	names.StatefulSetController,
	names.DaemonSetController,
	names.HorizontalPodAutoscalerController,
}

func controllerManagerMain() int { return cli.Run(app.NewControllerManagerCommand()) }

// controllerManagerArgs returns the flags of a single controller manager that serves no port. Each controller uses its
// own service account, as in production: the manager's own role does not have their rights.
func controllerManagerArgs(kubeconfig string, p pki, controllers []string) []string {
	return []string{
		"--kubeconfig=" + kubeconfig,
		"--controllers=" + strings.Join(controllers, ","),
		"--use-service-account-credentials=true",
		"--service-account-private-key-file=" + p.serviceAccountKey,
		"--root-ca-file=" + p.caCert,
		"--cluster-signing-cert-file=" + p.caCert,
		"--cluster-signing-key-file=" + p.caKey,
		"--leader-elect=false",
		"--secure-port=0",
	}
}

// checkControllers returns an error for names that kube-controller-manager would reject when it starts, which is late.
func checkControllers(controllers []string) error {
	known, aliases := app.KnownControllers(), app.ControllerAliases()
	for _, c := range controllers {
		name := strings.TrimPrefix(c, "-")
		if _, isAlias := aliases[name]; c != "*" && !isAlias && !slices.Contains(known, name) {
			return fmt.Errorf("--controllers: %q is unknown; "+
				`"devcluster kube-controller-manager --help" lists them under --controllers`, name)
		}
	}
	return nil
}

// makesServiceAccounts reports whether the chosen controllers create default service accounts, without which the API
// server accepts no pods.
func makesServiceAccounts(controllers []string) bool {
	const alias = "serviceaccount"
	if slices.Contains(controllers, "-"+names.ServiceAccountController) || slices.Contains(controllers, "-"+alias) {
		return false
	}
	return slices.ContainsFunc(controllers, func(c string) bool {
		return c == "*" || c == alias || c == names.ServiceAccountController
	})
}
