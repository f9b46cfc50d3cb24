package main

import (
	"os"

	_ "k8s.io/client-go/plugin/pkg/client/auth" // the exec and OIDC credential plugins of kubeconfigs
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

// kubectlMain is kubectl as released, built from the same version as the server.
func kubectlMain() int {
	// Commands are built before their flags are parsed, and already log.
	_, _ = logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err) // prints and exits with kubectl's own code
	}
	return 0
}
